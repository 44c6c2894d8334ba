"""Metrics of the trainer. Figures of a step are those of its step record, the last one's."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from slipstream.common.metrics import Reading
from slipstream.trainer.status import Status

phase_seconds = Histogram(
    "slipstream_trainer_phase_seconds",
    "Time of a step by phase: wait (for a plan), fetch (rows), train, publish (beside the next step).",
    ["phase"],
    buckets=(0.01, 0.05, 0.2, 0.5, 1, 2, 5, 15, 60, 300),
)
tokens = Counter("slipstream_trainer_tokens", "Tokens trained on, prompts included.")
sequences_lost = Counter("slipstream_trainer_sequences_lost", "Sequences whose rows were gone: they trained nothing.")
policy_step = Reading("gauge", "slipstream_trainer_policy_step", "Last version published.")

_GAUGES = {
    "loss": Gauge("slipstream_trainer_loss", "Loss of the last step."),
    "grad_norm": Gauge("slipstream_trainer_grad_norm", "Norm of the gradient before clipping."),
    "entropy": Gauge("slipstream_trainer_entropy_nats", "Mean entropy of the distributions sampled from."),
    "mismatch_kl": Gauge("slipstream_trainer_mismatch_k3", "Mismatch of trainer and engine, k3 estimate of the KL."),
    "masked_fraction": Gauge("slipstream_trainer_masked_fraction", "Part of the tokens that the loss masks or clips."),
    "reference_kl": Gauge("slipstream_trainer_reference_kl_nats", "KL to the reference policy, k3 estimate."),
    "teacher_kl": Gauge(
        "slipstream_trainer_teacher_kl_nats", "KL to the teacher, mean difference of log-probabilities."
    ),
    "logps_unknown": Gauge("slipstream_trainer_logps_unknown", "Tokens of the last step without a log-probability."),
    "padding_fraction": Gauge("slipstream_trainer_padding_fraction", "Part of attention's slots that hold no token."),
    "routes_unknown_fraction": Gauge(
        "slipstream_trainer_routes_unknown_fraction", "Part of the positions whose routes could not be replayed."
    ),
}
_RATIO = Gauge(
    "slipstream_trainer_ratio", "Quantiles of trainer's over engine's probability in the last step.", ["quantile"]
)
_RATIO_QUANTILES = {
    "ratio_p50": "0.5",
    "ratio_p90": "0.9",
    "ratio_p99": "0.99",
    "ratio_p999": "0.999",
    "ratio_max": "1",
}


def observe(status: Status) -> None:
    """Read this trainer from now on."""
    policy_step.read_from(lambda: status.version.step)


def step_trained(figures: dict[str, float]) -> None:
    """Take in the figures of a step."""
    for phase in ("wait", "fetch", "train"):
        phase_seconds.labels(phase).observe(figures[f"{phase}_s"])
    tokens.inc(figures["tokens"])
    sequences_lost.inc(figures["sequences_lost"])
    for name, gauge in _GAUGES.items():
        if name in figures:
            gauge.set(figures[name])
    for name, quantile in _RATIO_QUANTILES.items():
        if name in figures:
            _RATIO.labels(quantile).set(figures[name])
