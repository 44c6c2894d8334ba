"""Figures of a step on the Prometheus endpoint."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from slipstream.trainer.cost import speed
from slipstream.trainer.frozen import FrozenModels
from slipstream.trainer.loss_config import GrpoLossConfig
from slipstream.trainer.step import Learner
from slipstream.trainer.telemetry import step_trained

from .tiny import BASE, OPTIM, sequence, tiny_model


def test_what_the_loss_did_in_the_last_step_is_shown():
    agent = Learner(tiny_model(), OPTIM, GrpoLossConfig(), FrozenModels(reference=tiny_model(seed=1)))
    figures = agent.train([[sequence(1)], [sequence(2, advantage=-1.0)]], step=1, loss_token_count=10, trained=BASE)
    outside = {"wait_s": 0.0, "fetch_s": 0.0, "train_s": 0.1, "export_s": 0.0, "tokens": 20.0, "sequences_lost": 0.0}
    step_trained({**figures, **outside, **speed(figures["model_flops"], 20.0, 0.1, peak=1e9)})
    quantiles = {"0.5": "ratio_p50", "0.9": "ratio_p90", "0.99": "ratio_p99", "0.999": "ratio_p999", "1": "ratio_max"}
    for quantile, name in quantiles.items():
        assert REGISTRY.get_sample_value("slipstream_trainer_ratio", {"quantile": quantile}) == figures[name]
    for name in ("reference_kl_nats", "masked_fraction", "logps_unknown", "entropy_nats", "grad_norm"):
        shown = REGISTRY.get_sample_value(f"slipstream_trainer_{name}")
        assert shown == figures[name.removesuffix("_nats")]
    assert figures["reference_kl"] > 0
    labelled = {
        ("mismatch_part_k3", "part", "numeric"): "mismatch_numeric",
        ("mismatch_part_k3", "part", "stale_kv"): "mismatch_stale_kv",
        ("tokens_fraction", "part", "numeric"): "tokens_pure_fraction",
        ("expert_load_violation", "layers", "max"): "expert_load_max",
        ("memory_bytes", "kind", "resident"): "memory_resident_bytes",
    }
    for (gauge, label, value), name in labelled.items():
        assert REGISTRY.get_sample_value(f"slipstream_trainer_{gauge}", {label: value}) == figures[name]
    assert REGISTRY.get_sample_value("slipstream_trainer_tokens_per_second") == pytest.approx(200)
    assert REGISTRY.get_sample_value("slipstream_trainer_mfu") == pytest.approx(figures["model_flops"] / 1e8)
    for part in ("forward", "loss", "backward", "optimizer", "frozen"):
        assert REGISTRY.get_sample_value("slipstream_trainer_part_seconds_count", {"part": part})
