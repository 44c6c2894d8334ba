"""Metrics of the trainer. Figures of a step are those of its step record, the last one's."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from slipstream.common.metrics import Reading
from slipstream.trainer.cost import STEP_PHASES
from slipstream.trainer.status import Status

phase_seconds = Histogram(
    "slipstream_trainer_phase_seconds",
    "Time of a step by phase: wait (for a plan), fetch (rows), train, export, publish (beside the next step).",
    ["phase"],
    buckets=(0.01, 0.05, 0.2, 0.5, 1, 2, 5, 15, 60, 300),
)
part_seconds = Histogram(
    "slipstream_trainer_part_seconds",
    "Time within train by part: forward, loss, backward, optimizer, frozen (other models), replay_check.",
    ["part"],
    buckets=(0.001, 0.01, 0.05, 0.2, 0.5, 1, 2, 5, 15, 60, 300),
)
tokens = Counter("slipstream_trainer_tokens", "Tokens trained on, prompts included.")
sequences_lost = Counter("slipstream_trainer_sequences_lost", "Sequences whose rows were gone: they trained nothing.")
rollouts_refused = Counter(
    "slipstream_trainer_rollouts_refused", "Rollouts lost as a field or its rows were wrong, twice.", ["field"]
)
steps_skipped = Counter(
    "slipstream_trainer_steps_skipped", "Steps whose loss or gradient was not finite, or of which nothing is known."
)
checkpoints_failed = Counter("slipstream_trainer_checkpoints_failed", "Checkpoints that could not be written.")
_checkpoint_step = Gauge("slipstream_trainer_checkpoint_step", "Step of the newest checkpoint.")
_checkpoint_seconds = Histogram(
    "slipstream_trainer_checkpoint_seconds",
    "Time of a checkpoint: copy (between two steps), whole (until it is durable).",
    ["part"],
    buckets=(0.01, 0.05, 0.2, 1, 5, 15, 60, 300, 1200),
)
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
    "padding_fraction": Gauge("slipstream_trainer_padding_fraction", "Part of the packed rows that is padding."),
    "attention_padding_fraction": Gauge(
        "slipstream_trainer_attention_padding_fraction", "Part of attention's slots that hold no token."
    ),
    "routes_unknown_fraction": Gauge(
        "slipstream_trainer_routes_unknown_fraction", "Part of the positions whose routes could not be replayed."
    ),
    "trainer_tokens_per_s": Gauge(
        "slipstream_trainer_tokens_per_second",
        "Tokens of the last step, prompts included, by its time from plan to weights.",
    ),
    "model_flops_per_s": Gauge("slipstream_trainer_model_flops_per_second", "FLOPs the model needs, by that time."),
    "mfu": Gauge("slipstream_trainer_mfu", "The same as a part of what the devices can do, where that is known."),
}
_MISMATCH_PARTS = ("numeric", "policy_lag", "stale_kv")
_MISMATCH = Gauge(
    "slipstream_trainer_mismatch_part_k3",
    "The mismatch by what a token's context was computed with: numeric, policy_lag, stale_kv. They add up.",
    ["part"],
)
_TOKENS = Gauge("slipstream_trainer_tokens_fraction", "Part of the loss tokens of each such part.", ["part"])
_EXPERT_LOAD = Gauge(
    "slipstream_trainer_expert_load_violation",
    "(max - mean) / mean of the choices of a layer's experts: of the worst layer (max), and the layers' mean.",
    ["layers"],
)
_MEMORY = Gauge(
    "slipstream_trainer_memory_bytes",
    "Memory in the last step: allocated, reserved (of a card, at most); resident, resident_max (of the process).",
    ["kind"],
)
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

_LABELLED = (
    *((_RATIO, quantile, name) for name, quantile in _RATIO_QUANTILES.items()),
    *((_MISMATCH, part, f"mismatch_{part}") for part in _MISMATCH_PARTS),
    *((_TOKENS, part, f"tokens_{'pure' if part == 'numeric' else part}_fraction") for part in _MISMATCH_PARTS),
    *((_EXPERT_LOAD, layers, f"expert_load_{layers}") for layers in ("max", "mean")),
    *((_MEMORY, kind, f"memory_{kind}_bytes") for kind in ("allocated", "reserved", "resident", "resident_max")),
)
"""Gauges with a label: gauge, value of the label, name of the figure."""


def observe(status: Status) -> None:
    """Read this trainer from now on."""
    policy_step.read_from(lambda: status.version.step)


def checkpoint_written(step: int, copy_s: float, whole_s: float) -> None:
    """Take in a checkpoint that has become durable."""
    _checkpoint_step.set(step)
    _checkpoint_seconds.labels("copy").observe(copy_s)
    _checkpoint_seconds.labels("whole").observe(whole_s)


def step_trained(figures: dict[str, float]) -> None:
    """Take in the figures of a step."""
    for phase in ("wait", "fetch", "train", "export"):
        phase_seconds.labels(phase).observe(figures[f"{phase}_s"])
    for part in STEP_PHASES:
        if f"{part}_s" in figures:
            part_seconds.labels(part).observe(figures[f"{part}_s"])
    tokens.inc(figures["tokens"])
    sequences_lost.inc(figures["sequences_lost"])
    steps_skipped.inc(figures["step_skipped"])
    for name, gauge in _GAUGES.items():
        if name in figures:
            gauge.set(figures[name])
    for gauge, label, name in _LABELLED:
        if name in figures:
            gauge.labels(label).set(figures[name])
