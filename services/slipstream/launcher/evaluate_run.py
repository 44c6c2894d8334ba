"""Evaluates a run that is up, through its public API: groups of held-out tasks beside those of training.

A few are asked at a time, so that training goes on. They are the run's third parties' groups: never trained on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import grpc

from slipstream.algorithms.evaluation import Answer
from slipstream.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc, runner_pb2
from slipstream.api.run.v1 import run_pb2, run_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common.channel import open_channel
from slipstream.common.errors import (
    DeadlineExceeded,
    RolloutQueueFull,
    RolloutUnknown,
    RunEnded,
    Unreachable,
    from_rpc_error,
)
from slipstream.environments.config import EnvironmentConfig
from slipstream.launcher.errors import LauncherError
from slipstream.launcher.evaluate_results import EnvironmentAnswers
from slipstream.launcher.ports import read_endpoints
from slipstream.launcher.rundir import RunDir
from slipstream.launcher.services import access_to
from slipstream.orchestrator.evaluation import WRONG, answer_of, versions_of
from slipstream.orchestrator.evaluation_config import EvaluationConfig
from slipstream.trainer.checkpoint_store import CheckpointStore

CALL_TIMEOUT_S = 10.0
CANCEL_TIMEOUT_S = 3.0
FIRST_LOOK_S = 0.1
LOOK_S = 1.0
AWAY_S = 60.0
"""The orchestrator may be away for so long, in seconds."""
PAUSED_S = 10.0
"""A run that is asked may be paused for so long, in seconds: a full disk, say, that is being cleared."""
ATTEMPTS = 3
MAX_SAMPLES = 64


@dataclass(frozen=True)
class Asking:
    """How problems are asked."""

    samples: int
    temperature: float | None
    """None: greedy for one sample, the environment's own for more."""
    seed: int
    parallel: int
    """Groups at once."""


async def evaluate_run(
    run: RunDir,
    environments: Sequence[tuple[EnvironmentConfig, int]],
    asking: Asking,
    on_progress: Callable[[int, int], None],
) -> dict[str, EnvironmentAnswers]:
    """Ask the first so many held-out problems of each environment. Raises `LauncherError`."""
    answers = {environment.name: EnvironmentAnswers() for environment, _ in environments}
    tasks = [(environment, index) for environment, count in environments for index in range(count)]
    problems: dict[tuple[str, int], list[Answer]] = {}
    places = asyncio.Semaphore(asking.parallel)
    async with open_channel(read_endpoints(run.endpoints_file)["orchestrator"], access_to(run)) as channel:
        asker = _Asker(rollout_pb2_grpc.RolloutServiceStub(channel), asking)

        async def ask(environment: EnvironmentConfig, index: int) -> None:
            async with places:
                records = await asker.ask(environment, index)
            found = answers[environment.name]
            found.failed += records is None
            problems[environment.name, index] = (
                [WRONG] * asking.samples if records is None else [answer_of(record) for record in records]
            )
            found.versions |= {str(version) for record in records or [] for version in versions_of(record)}
            on_progress(len(problems), len(tasks))

        watch = _Watch(run_pb2_grpc.RunServiceStub(channel), run)
        await watch.look()
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(
                    watch.run(lambda: len(problems), max(e.deadline_s for e, _ in environments))
                )
                asked = [group.create_task(ask(environment, index)) for environment, index in tasks]
                await asyncio.wait(asked)  # not `gather`: who has enough cancels each of them once
                watching.cancel()
        except* LauncherError as failed:
            raise failed.exceptions[0] from None
    for name, index in sorted(problems):
        answers[name].problems.append(problems[name, index])
    return answers


class _Watch:
    """Over a run that is asked: raises `LauncherError` once it is paused, or gives no answer, for too long."""

    def __init__(self, stub: run_pb2_grpc.RunServiceStub, run: RunDir) -> None:
        self._stub = stub
        self._run = run
        self._paused_since_s: float | None = None

    async def run(self, answered: Callable[[], int], deadline_s: float) -> None:
        """For ever. `deadline_s`: the longest that a group may take, all attempts of which may be needed."""
        seen, seen_s = -1, time.monotonic()
        while True:
            if answered() != seen:
                seen, seen_s = answered(), time.monotonic()
            silent_s = time.monotonic() - seen_s
            if silent_s > AWAY_S + ATTEMPTS * deadline_s:
                raise LauncherError(
                    f"{self._run.name} has answered nothing for {silent_s:.0f} s; see slipstream status"
                )
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Ask how the run is."""
        try:
            now = (await self._stub.GetRun(run_pb2.GetRunRequest(), timeout=CALL_TIMEOUT_S)).run
        except grpc.aio.AioRpcError:
            return  # whoever asks waits for it, within limits
        if now.state != run_pb2.RUN_STATE_PAUSED:
            self._paused_since_s = None
            return
        now_s = time.monotonic()
        self._paused_since_s = now_s if self._paused_since_s is None else self._paused_since_s
        if now_s - self._paused_since_s >= PAUSED_S:
            saved = CheckpointStore(self._run.path / "checkpoints").versions()
            ask = f"; a checkpoint can be asked: slipstream eval {self._run.name} --checkpoint newest" if saved else ""
            raise LauncherError(f"{self._run.name} is paused ({now.reason}), and answers nothing until it goes on{ask}")


class _Asker:
    """One problem at a time, over an orchestrator that may be away for a while."""

    def __init__(self, stub: rollout_pb2_grpc.RolloutServiceStub, asking: Asking) -> None:
        self._stub = stub
        self._asking = asking
        self._id = uuid4().hex

    async def ask(self, environment: EnvironmentConfig, index: int) -> list[runner_pb2.RolloutRecord] | None:
        """The samples of a problem; None when it failed again and again."""
        for attempt in range(ATTEMPTS):
            rollout = await self._create(environment, index, attempt)
            try:
                rollout = await self._ended(rollout)
            except RolloutUnknown:  # the orchestrator was started again, and has none of third parties' groups
                continue
            except asyncio.CancelledError:
                await self._cancel(rollout)
                raise
            if rollout.state == rollout_pb2.ROLLOUT_STATE_FINISHED and rollout.records:
                return list(rollout.records)
            if rollout.state == rollout_pb2.ROLLOUT_STATE_CANCELLED:
                raise LauncherError(f"the run took back what it was asked: {rollout.detail or rollout.reason}")
        return None

    async def _create(self, environment: EnvironmentConfig, index: int, attempt: int) -> rollout_pb2.Rollout:
        asking = self._asking
        name = f"eval/{asking.seed}/{environment.name}/{index}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        how = EvaluationConfig(samples=asking.samples, temperature=asking.temperature)
        sampling = types_pb2.Sampling(
            temperature=how.temperature_for(environment.temperature),
            max_new_tokens=environment.max_new_tokens,
            seed=int.from_bytes(digest, "little") >> 33,
        )
        request = rollout_pb2.CreateRolloutRequest(
            request_id=f"{self._id}-{environment.name}-{index}-{attempt}"[:128],
            task=rollout_pb2.TaskRef(environment=environment.name, split="held_out", index=index),
            sample_count=asking.samples,
            sampling=sampling,
            labels={"evaluation": str(asking.seed)},
        )
        answer = await self._call(lambda: self._stub.CreateRollout(request, timeout=CALL_TIMEOUT_S))
        return answer.rollout

    async def _ended(self, rollout: rollout_pb2.Rollout) -> rollout_pb2.Rollout:
        """Look until the group has ended; its deadline and its runners' leases are the orchestrator's affair."""
        pause_s = FIRST_LOOK_S
        request = rollout_pb2.GetRolloutRequest(group_id=rollout.group_id)
        while rollout.state in (rollout_pb2.ROLLOUT_STATE_QUEUED, rollout_pb2.ROLLOUT_STATE_RUNNING):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_S)
            rollout = (await self._call(lambda: self._stub.GetRollout(request, timeout=CALL_TIMEOUT_S))).rollout
        return rollout

    async def _cancel(self, rollout: rollout_pb2.Rollout) -> None:
        """Nobody waits for it any more: the run need not sample it."""
        request = rollout_pb2.CancelRolloutRequest(request_id=uuid4().hex, group_id=rollout.group_id)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._stub.CancelRollout(request, timeout=CANCEL_TIMEOUT_S)

    async def _call(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """A call that is safe to repeat, while its peer is away or has no place. Raises `LauncherError`.

        And `RolloutUnknown`, which only whoever asked can do something about.
        """
        until_s = time.monotonic() + AWAY_S
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                rebuilt = from_rpc_error(error)
                if isinstance(rebuilt, RunEnded):
                    raise LauncherError("the run has ended: stop it, and ask its weights") from None
                if isinstance(rebuilt, RolloutUnknown):
                    raise rebuilt from None
                if isinstance(rebuilt, RolloutQueueFull):
                    until_s = time.monotonic() + AWAY_S
                elif not isinstance(rebuilt, Unreachable | DeadlineExceeded) or time.monotonic() > until_s:
                    raise LauncherError(f"the run refuses: {rebuilt.message} ({rebuilt.reason})") from None
            await asyncio.sleep(LOOK_S)
