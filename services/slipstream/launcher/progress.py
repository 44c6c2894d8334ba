"""What a run looks like while it goes on: what is done, how well, how long it will take."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from slipstream.api.run.v1 import run_pb2, run_pb2_grpc
from slipstream.launcher.errors import RunFailedError

ENDED = (run_pb2.RUN_STATE_FINISHED, run_pb2.RUN_STATE_FAILED, run_pb2.RUN_STATE_STOPPED)
PHASE_NAMES = {
    "starting": "starting",
    "warm_up": "supervised warm-up",
    "evaluating_before": "evaluating before",
    "training": "training",
    "evaluating_after": "evaluating after",
    "ended": "ended",
}
RETRY_S = 0.5
FILTERED = "groups_filtered_since_step"
MANY_MORE = 4
"""Failed groups are told of again when there are so many times as many as when they were told of last."""
SILENCE_TIMEOUT_S = 10.0


async def watch_run(channel: grpc.aio.Channel, on_run: Callable[[run_pb2.Run], None]) -> run_pb2.Run:
    """Follow the run until it has ended, over restarts of the orchestrator; raises `RunFailedError`."""
    stub = run_pb2_grpc.RunServiceStub(channel)
    while True:
        with suppress(grpc.aio.AioRpcError):  # whether the orchestrator may be away is the supervisor's to judge
            async for response in stub.WatchRun(run_pb2.WatchRunRequest(max_per_second=2), wait_for_ready=True):
                on_run(response.run)
                if response.run.state == run_pb2.RUN_STATE_FAILED:
                    raise RunFailedError(response.run.reason or "the run failed")
                if response.run.state in ENDED:
                    return response.run
        await asyncio.sleep(RETRY_S)


class TimeLeft:
    """Estimates the rest of the run from the phases seen so far."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phase = ""
        self._begun_s = 0.0
        self._begun_fraction = 0.0
        self._evaluation_s = 0.0

    def update(self, run: run_pb2.Run) -> float | None:
        """Seconds left, or None while nothing is known: before training, and at the start of a phase."""
        now_s, fraction = self._clock(), run.phase_fraction_done
        if run.phase != self._phase:
            if self._phase == "evaluating_before":
                self._evaluation_s = now_s - self._begun_s  # the one at the end asks as many problems
            self._phase, self._begun_s, self._begun_fraction = run.phase, now_s, fraction
        done = fraction - self._begun_fraction
        if run.phase == "ended":
            return 0.0
        if run.phase not in ("training", "evaluating_after") or done < 0.02:
            return None
        left_s = (now_s - self._begun_s) / done * (1 - fraction)
        return left_s + (self._evaluation_s if run.phase == "training" else 0.0)


def facts(run: run_pb2.Run, left_s: float | None) -> list[tuple[str, str]]:
    """Name and value of what is worth showing now."""
    metrics = run.metrics
    shown = [("phase", PHASE_NAMES.get(run.phase, run.phase) + (" (paused)" if paused(run) else ""))]
    if run.phase == "training":
        shown.append(("step", f"{run.step}/{run.total_steps}"))
        if ready := ready_groups(run):
            shown.append(("groups", ready))
        if filtered := filtered_groups(run):
            shown.append(("filtered", "1 group" if filtered == 1 else f"{filtered} groups"))
    elif run.phase == "warm_up" and "sft_step" in metrics:  # when it ends, its accuracy decides
        shown.append(("step", f"{metrics['sft_step']:.0f}"))
        shown.append(("loss", f"{metrics['sft_loss']:.2f}"))
        shown.append(("right", f"{100 * metrics['sft_accuracy']:.0f} %"))
        shown.append(("done", f"{100 * run.phase_fraction_done:.0f} %"))
    else:
        shown.append(("done", f"{100 * run.phase_fraction_done:.0f} %"))
    # Of the newest step: in another phase they would be figures of the past.
    for name, key, digits in (("reward", "reward_mean", 2), ("lag", "lag_mean", 1), ("tokens/s", "tokens_per_s", 0)):
        if run.phase == "training" and key in metrics:
            value = metrics[key]
            shown.append((name, f"{value:.{digits}f}" if math.isfinite(value) else "–"))
    shown.append(("left", "not known yet" if left_s is None else duration(left_s)))
    return shown


def filtered_groups(run: run_pb2.Run) -> int:
    """Groups that were filtered since the last step, as all their rollouts earned the same."""
    return int(run.metrics.get(FILTERED, 0.0)) if run.phase == "training" else 0


def ready_groups(run: run_pb2.Run) -> str:
    """How many groups the next step has of those that it takes; empty where none is to come."""
    metrics = run.metrics
    if "groups_ready" not in metrics:
        return ""
    needed = metrics["groups_per_step"]
    return f"{min(metrics['groups_ready'], needed):.0f} of {needed:.0f}"


def paused(run: run_pb2.Run) -> bool:
    return run.state == run_pb2.RUN_STATE_PAUSED


class Milestones:
    """Tells each evaluation's result once, as soon as it is there."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def news(self, run: run_pb2.Run) -> list[str]:
        """Sentences on what has come since the last call."""
        found: dict[str, list[str]] = {}
        for result in run.accuracies:
            part = f"{result.environment} {100 * result.accuracy:.1f} % of {result.problem_count}"
            found.setdefault(result.evaluation, []).append(part)
        fresh = {name: parts for name, parts in found.items() if name not in self._told}
        self._told |= fresh.keys()
        return [f"held-out accuracy {_when(name)}: {', '.join(parts)}" for name, parts in fresh.items()]


class Warnings:
    """Tells each warning of the run when it comes, and that it is over."""

    def __init__(self) -> None:
        self._told: list[str] = []

    def news(self, run: run_pb2.Run) -> list[str]:
        """Sentences on what has changed since the last call."""
        now = list(run.warnings)
        fresh = [f"warning: {sentence}" for sentence in now if sentence not in self._told]
        over = [f"over: {sentence}" for sentence in self._told if sentence not in now and run.phase != "ended"]
        self._told = now
        return over + fresh


def _when(evaluation: str) -> str:
    """By the name of an evaluation."""
    kind, _, step = evaluation.partition("-")
    return f"at step {step}" if kind == "step" else f"{evaluation} training"


class GroupFailures:
    """Reads along in `metrics.jsonl`: the first group of an environment that failed, and when many more have."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self._told: dict[str, int] = {}

    def news(self) -> list[str]:
        """Sentences on what has come since the last call."""
        newest: dict[str, dict[str, Any]] = {}
        for record in self._records():
            newest[str(record["environment"])] = record
        fresh = {
            name: record
            for name, record in newest.items()
            if record["groups_failed"] >= max(1, MANY_MORE * self._told.get(name, 0))
        }
        self._told |= {name: record["groups_failed"] for name, record in fresh.items()}
        return [failure_sentence(record) for record in fresh.values()]

    def _records(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._read_bytes:
                    self._read_bytes = 0  # it reached its bound and began anew
                file.seek(self._read_bytes)
                whole = file.read().rpartition(b"\n")[0]
        except OSError:
            return []
        self._read_bytes += len(whole) + 1 if whole else 0
        return [json.loads(line) for line in whole.splitlines() if b'"kind":"group_failed"' in line]


def failure_sentence(record: dict[str, Any]) -> str:
    return (
        f"{record['groups_failed']} of {record['groups_ended']} groups of {record['environment']!r} failed, "
        f"the last with {record['detail']}; traceback in logs/{record['runner']}.log"
    )


def outcome(run: run_pb2.Run) -> str:
    """Accuracy of each environment before and after, as far as measured."""
    found: dict[str, dict[str, float]] = {}
    for result in run.accuracies:
        found.setdefault(result.environment, {})[result.evaluation] = result.accuracy
    return ", ".join(f"{name} {_percent(each, 'before')} -> {_percent(each, 'after')}" for name, each in found.items())


def _percent(accuracies: dict[str, float], name: str) -> str:
    return f"{100 * accuracies[name]:.1f} %" if name in accuracies else "not measured"


def duration(seconds: float) -> str:
    minutes, rest = divmod(max(round(seconds), 0), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
