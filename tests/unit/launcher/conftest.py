"""Writes a run directory as the services would leave it, without running any."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.common.compressed_lines import encode_frame, encode_line
from slipstream.launcher.rundir import RunDir

BEGIN_S = 1_800_000_000.0
TRAIN_BEGIN_S = BEGIN_S + 60


def write_lines(path: Path, records: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_rollouts(path: Path, records: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_frame([encode_line(record) for record in records]))


def write_run(path: Path, *, steps: int = 120, step_s: float = 1.0) -> RunDir:
    """A finished run that learned: each step trains for 0.6 of its time, decode pauses for 0.1 of it."""
    draw = random.Random(0)
    path.mkdir(parents=True)
    (path / "config.toml").write_text(
        '[run]\nname = "synthetic"\nseed = 3\n\n[orchestrator]\nmax_off_policy_steps = 2\n\n'
        '[[environments]]\nname = "spell_backward"\n\n[[environments]]\nname = "make_number"\n'
    )
    metrics: list[dict[str, object]] = [{"kind": "phase", "time_s": BEGIN_S, "phase": "starting"}]
    metrics += _evaluations("before", 0, BEGIN_S + 55, (0.41, 0.18))
    end_s = TRAIN_BEGIN_S + steps * step_s
    for step in range(1, steps + 1):
        metrics.append(_step(step, steps, TRAIN_BEGIN_S + step * step_s, draw))
        for replica in ("prefill-1", "decode-1", "decode-2"):
            metrics.append(_update(step, replica, TRAIN_BEGIN_S + step * step_s, draw))
    metrics.append({"kind": "cancelled", "time_s": end_s, "reason": "AGED_OUT", "environment": "x", "count": 40})
    metrics.append({"kind": "cancelled", "time_s": end_s, "reason": "RUN_ENDING", "environment": "x", "count": 8})
    metrics += _evaluations("after", steps, end_s + 5, (0.955, 0.61))
    metrics.append({"kind": "run", "time_s": end_s + 6, "state": "finished", "reason": "", "sandbox_executions": 7680})
    write_lines(path / "metrics.jsonl", metrics)
    write_lines(path / "launcher.jsonl", [
        {"kind": "run_started", "time_s": BEGIN_S}, {"kind": "run_ended", "time_s": end_s + 10}
    ])  # fmt: skip
    _write_timeline(path, steps, step_s)
    _write_rollouts(path, steps)
    return RunDir(path)


def _evaluations(name: str, step: int, time_s: float, accuracies: tuple[float, float]) -> list[dict[str, object]]:
    return [
        {"kind": "evaluation", "time_s": time_s, "name": name, "step": step, "environment": environment,
         "accuracy": accuracy, "count": 200}
        for environment, accuracy in zip(("spell_backward", "make_number"), accuracies, strict=True)
    ]  # fmt: skip


def _step(step: int, steps: int, time_s: float, draw: random.Random) -> dict[str, object]:
    progress = 1 - math.exp(-3 * step / steps)
    lag = min(step - 1, 2) if step % 5 else min(step - 1, 1)
    return {
        "kind": "step", "time_s": time_s, "step": step, "reward_mean": 0.3 + 0.6 * progress,
        "reward_by_environment": {
            "spell_backward": min(0.4 + 0.55 * progress + draw.gauss(0, 0.03), 1),
            "make_number": min(0.15 + 0.5 * progress + draw.gauss(0, 0.05), 1),
        },
        "lag_mean": float(lag), "lag_max": lag, "lag_counts": {str(lag): 30, str(max(lag - 1, 0)): 2},
        "groups_trained": 32, "groups_filtered": step // 8, "tokens": 2000, "tokens_per_s": 2400 + draw.gauss(0, 200),
        "loss": 0.1, "grad_norm": abs(draw.gauss(0.8, 0.2)), "entropy": 0.9 - 0.6 * progress,
        "mismatch_kl": 2e-3 * draw.uniform(0.5, 1.5), "mismatch_numeric": 3e-11 * draw.uniform(0.5, 1.5),
        "mismatch_policy_lag": 3e-3 * draw.uniform(0.5, 1.5), "mismatch_stale_kv": 9e-4 * draw.uniform(0.5, 1.5),
        "ratio_p999": 1.3 + draw.random() * 0.3, "routes_unknown_fraction": 0.0, "step_s": 0.6, "wait_s": 0.4,
        **({"replay_check_tokens": 1000, "routes_flipped_fraction": 0.01, "replay_check_numeric_fraction": 0.25,
            "replay_check_policy_lag_fraction": 0.5, "replay_check_stale_kv_fraction": 0.25,
            "replay_on_kl": 3e-3, "replay_on_numeric": 1e-11, "replay_on_policy_lag": 2e-3, "replay_on_stale_kv": 1e-3,
            "replay_off_kl": 8e-3, "replay_off_numeric": 1e-3, "replay_off_policy_lag": 4e-3,
            "replay_off_stale_kv": 3e-3} if step % 5 == 1 else {}),
        "cached_token_count": 300, "prefix_query_token_count": 400, "sandbox_executions": step * 64,
    }  # fmt: skip


def _update(step: int, replica: str, time_s: float, draw: random.Random) -> dict[str, object]:
    return {"kind": "update", "time_s": time_s, "version": f"1.{step}", "replica": replica,
            "pause_s": draw.uniform(0.004, 0.02), "total_s": 0.05, "in_flight_samples": 40}  # fmt: skip


def _write_timeline(path: Path, steps: int, step_s: float) -> None:
    rows: dict[str, list[dict[str, object]]] = {"trainer": [], "decode-1": [], "decode-2": [], "prefill-1": []}
    rows["trainer"].append({"kind": "sft", "start_s": BEGIN_S + 15, "end_s": BEGIN_S + 45})
    for step in range(steps):
        at_s = TRAIN_BEGIN_S + step * step_s
        rows["trainer"].append({"kind": "train_step", "start_s": at_s, "end_s": at_s + 0.6 * step_s})
        for replica in ("decode-1", "decode-2"):
            rows[replica].append({"kind": "decode", "start_s": at_s + 0.1 * step_s, "end_s": at_s + 0.9 * step_s})
            rows[replica].append({"kind": "update", "start_s": at_s + 0.91 * step_s, "end_s": at_s + 0.93 * step_s})
        rows["prefill-1"].append({"kind": "prefill", "start_s": at_s + 0.05 * step_s, "end_s": at_s + 0.1 * step_s})
    for replica, records in rows.items():
        write_lines(path / "timeline" / f"{replica}.jsonl", records)


def _write_rollouts(path: Path, steps: int) -> None:
    words = ["planet", "garden", "silver", "window", "candle", "bridge", "meadow", "orange", "pepper", "ticket"]
    records: list[dict[str, object]] = []
    for index, word in enumerate(words):
        for version, correct in (("1.0", index % 4 == 0), (f"1.{steps}", index != 3)):
            answer = word[::-1] if correct else word[::-1][:-2] + "e"
            records.append({"purpose": "evaluation", "environment": "spell_backward", "task_index": index,
                            "dispatch_version": version, "prompt": f"Spell this word backward: {word}",
                            "completion": answer, "reward": float(correct), "correct": correct})  # fmt: skip
            right = correct or index % 3 == 0
            records.append({"purpose": "evaluation", "environment": "make_number", "task_index": index,
                            "dispatch_version": version, "prompt": f"{17 + index} =",
                            "completion": f"8+9+{index}" if right else "8*<2", "correct": right})  # fmt: skip
    write_rollouts(path / "rollouts" / "runner-1.evaluation.jsonl.zst", records)


@pytest.fixture
def synthetic_run(tmp_path: Path) -> RunDir:
    return write_run(tmp_path / "synthetic", steps=20)


@pytest.fixture(name="write_lines")
def write_lines_fixture() -> Callable[[Path, list[dict[str, object]]], None]:
    return write_lines


@pytest.fixture(name="write_rollouts")
def write_rollouts_fixture() -> Callable[[Path, list[dict[str, object]]], None]:
    return write_rollouts
