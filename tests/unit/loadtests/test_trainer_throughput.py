"""The measurement of the trainer's speed, on a CPU and at sizes of no interest: what it counts, and that it ends."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bare_step import BareStep
from torch.multiprocessing.reductions import StorageWeakRef
from trainer_runs import RlStep
from trainer_shapes import SHAPES, make_model, make_sequence
from trainer_throughput import BUDGET_CARD, main, missed, parse, run_for

from slipstream.models.qwen3_moe.experts import PermutingDispatcher
from slipstream.trainer.cost import ModelCost


@pytest.mark.parametrize("shape", ["tiny", "tiny-dense", "tiny-lora"])
def test_a_small_shape_is_measured_in_seconds(shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "figures.jsonl"
    words = [
        "--context",
        "64",
        "--micro-batches",
        "2",
        "--steps",
        "1",
        "--warm-up",
        "1",
        "--device",
        "cpu",
        "--peak-flops",
        "1e11",
        "--out",
        str(out),
    ]
    assert main(["--shape", shape, *words]) == 0
    found = json.loads(out.read_text().splitlines()[-1])
    assert found["tokens"] == 128
    assert found["rl"]["tokens_per_s"] == pytest.approx(128 / found["rl"]["step_s"])
    assert sum(found["share"].values()) == pytest.approx(1.0)
    assert {"forward", "loss", "backward", "optimizer", "publish"} <= found["share"].keys()
    assert 0 < found["rl"]["mfu"] < 1
    assert found["grad_norm"] > 0
    assert ("replay_cost" in found) == SHAPES[shape].moe
    assert ("of_bare" in found) == (SHAPES[shape].lora is None)
    assert "RL step" in capsys.readouterr().out


def test_fp8_is_measured_beside_it(tmp_path: Path):
    out = tmp_path / "figures.jsonl"
    size = ["--context", "64", "--micro-batches", "1", "--steps", "1", "--device", "cpu", "--no-bare"]
    assert main(["--shape", "tiny-dense", "--fp8", *size, "--out", str(out)]) == 0
    first, *_, found = (json.loads(line) for line in out.read_text().splitlines())
    assert "rl" in first
    assert "fp8" not in first  # written before it was tried
    assert found["fp8_speedup"] == pytest.approx(found["rl"]["step_s"] / found["fp8"]["step_s"])


def test_fp8_is_measured_alone(tmp_path: Path):
    out = tmp_path / "figures.jsonl"
    size = ["--context", "64", "--micro-batches", "1", "--steps", "1", "--warm-up", "1", "--device", "cpu"]
    assert main(["--shape", "tiny-dense", "--only", "fp8", *size, "--out", str(out)]) == 0
    first, found = (json.loads(line) for line in out.read_text().splitlines())
    assert len(first["fp8_warm_up_s"]) == 1  # of what takes too long there is this
    assert found["fp8"]["tokens_per_s"] > 0
    assert not {"rl", "bare", "fp8_speedup"} & found.keys()


def test_a_profile_names_what_took_the_time(tmp_path: Path):
    size = ["--context", "64", "--micro-batches", "1", "--steps", "1", "--device", "cpu", "--no-bare"]
    assert main(["--shape", "tiny-dense", *size, "--profile", str(tmp_path)]) == 0
    assert "aten::" in (tmp_path / "profile-tiny-dense.txt").read_text()


def test_what_takes_too_long_is_ended(capfd: pytest.CaptureFixture[str]):
    assert run_for([sys.executable, "-c", "import time; time.sleep(60)"], 0.5) == 124
    assert "FAILED" in capfd.readouterr().out


def test_what_does_not_fit_is_tried_in_less_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    out, asked = tmp_path / "figures.jsonl", []
    of_step = RlStep.run

    def run(self: RlStep, batches: list[Any]) -> Any:
        asked.append(self.learner)
        if len(asked) == 2:
            raise torch.OutOfMemoryError("not enough")
        return of_step(self, batches)

    monkeypatch.setattr(RlStep, "run", run)
    size = ["--context", "64", "--micro-batches", "1", "--steps", "1", "--device", "cpu", "--no-bare"]
    assert main(["--shape", "tiny-dense", *size, "--out", str(out)]) == 0
    assert json.loads(out.read_text())["checkpointing"] == "full"


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_a_step_that_fails_leaves_nothing_in_memory(checkpointing: str, monkeypatch: pytest.MonkeyPatch):
    """Or there would be no room for the next, in less memory."""
    of_layer, calls = PermutingDispatcher.combine, []

    def combine(self: Any, *values: Any) -> torch.Tensor:
        calls.append(self)
        if len(calls) == 2:  # the first layer's graph is there
            raise torch.OutOfMemoryError("not enough")
        return of_layer(self, *values)

    monkeypatch.setattr(PermutingDispatcher, "combine", combine)
    arguments = parse(["--device", "cpu", "--checkpointing", checkpointing])
    step = RlStep(SHAPES["tiny-lora"], arguments, torch.device("cpu"))
    left = [StorageWeakRef(parameter.untyped_storage()) for parameter in step.learner.model.parameters()]
    with pytest.raises(torch.OutOfMemoryError):
        step.run([[make_sequence(SHAPES["tiny-lora"], 64, 0)]])
    assert len(calls) == 2
    del step
    calls.clear()
    gc.collect()
    assert not [each for each in left if not each.expired()]


def test_the_bare_step_is_of_the_same_model():
    for name in ("tiny", "tiny-dense"):
        shape, cpu = SHAPES[name], torch.device("cpu")
        ours, bare = make_model(shape, cpu), BareStep(shape, cpu, torch.float32).model
        assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in bare.parameters())


def test_shapes_for_a_card_have_the_sizes_that_they_are_called_after():
    def parameters(name: str) -> tuple[float, float]:
        shape = SHAPES[name]
        with torch.device("meta"):
            model = shape.build(shape.sizes)
        cost = ModelCost.of(model)
        return sum(p.numel() for p in model.parameters()) / 1e9, (cost.token_flops + cost.head_flops) / 6e9

    assert parameters("qwen3-0.6b") == pytest.approx((0.596, 0.596), abs=0.002)
    assert parameters("qwen3-30b-a3b-lora") == pytest.approx((30.5, 3.04), abs=0.05)
    assert parameters("moe-1b") == pytest.approx((4.86, 1.03), abs=0.02)


def test_sequences_replay_even_routes_of_different_experts():
    sequence = make_sequence(SHAPES["tiny"], 32, 0)
    rows = sequence.routes.rows
    assert rows.shape == (32, 2, 2)
    assert (rows[..., 0] != rows[..., 1]).all()
    assert sequence.known_N.all()
    assert not make_sequence(SHAPES["tiny"], 32, 0, replay=False).known_N.any()


def test_budgets_are_those_of_the_card_and_context_they_are_of():
    found = {
        "shape": "qwen3-0.6b",
        "device": f"NVIDIA {BUDGET_CARD}",
        "context": 16384,
        "rl": {"tokens_per_s": 20_000.0},
    }
    assert missed(found) == ["20,000 tokens/s; 24,000 are asked for"]
    assert missed({**found, "rl": {"tokens_per_s": 25_000.0}}) == []
    assert missed({**found, "device": "CPU"}) == []
    moe = {**found, "shape": "moe-1b", "of_bare": 0.9, "replay_cost": 1.05}
    assert len(missed(moe)) == 2
    assert parse([]).context == 16384
