"""`slipstream eval` on a run that is up, whose orchestrator is started again, or whose user has enough."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slipstream.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc, runner_pb2
from slipstream.api.run.v1 import run_pb2, run_pb2_grpc
from slipstream.common.config import ListenConfig, ServiceConfig
from slipstream.common.errors import RolloutUnknown
from slipstream.common.runtime import build_server
from slipstream.launcher import evaluate_run as evaluate_run_module
from slipstream.launcher.errors import LauncherError
from slipstream.launcher.evaluate_run import Asking, evaluate_run
from slipstream.launcher.ports import write_endpoints
from slipstream.launcher.rundir import RunDir

GIVE_UP_S = 90.0


class Orchestrator(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers groups, but for the first so many, which it forgets; or none at all."""

    def __init__(self, *, forgets: int = 0, answers: bool = True, paused: str = "") -> None:
        self.forgets, self.answers, self.paused = forgets, answers, paused
        self.created: list[str] = []
        self.looked_at: set[str] = set()
        self.cancelled: list[str] = []

    async def CreateRollout(self, request: rollout_pb2.CreateRolloutRequest, context: Any) -> Any:
        self.created.append(request.request_id)
        return rollout_pb2.CreateRolloutResponse(rollout=self._rollout(f"external-{len(self.created)}"))

    async def GetRollout(self, request: rollout_pb2.GetRolloutRequest, context: Any) -> Any:
        rollout = self._rollout(request.group_id)
        self.looked_at.add(request.group_id)
        if int(request.group_id.partition("-")[2]) <= self.forgets:
            raise RolloutUnknown("started again", group_id=request.group_id)
        if self.answers:
            rollout.state = rollout_pb2.ROLLOUT_STATE_FINISHED
            rollout.records.append(runner_pb2.RolloutRecord(correct=True, reward=1.0))
        return rollout_pb2.GetRolloutResponse(rollout=rollout)

    async def CancelRollout(self, request: rollout_pb2.CancelRolloutRequest, context: Any) -> Any:
        self.cancelled.append(request.group_id)
        return rollout_pb2.CancelRolloutResponse(rollout=self._rollout(request.group_id))

    def _rollout(self, group_id: str) -> rollout_pb2.Rollout:
        return rollout_pb2.Rollout(group_id=group_id, state=rollout_pb2.ROLLOUT_STATE_RUNNING)


class RunService(run_pb2_grpc.RunServiceServicer):
    """Says whether the run is paused."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    async def GetRun(self, request: run_pb2.GetRunRequest, context: Any) -> run_pb2.GetRunResponse:
        paused = run_pb2.RUN_STATE_PAUSED if self._orchestrator.paused else run_pb2.RUN_STATE_RUNNING
        return run_pb2.GetRunResponse(run=run_pb2.Run(state=paused, reason=self._orchestrator.paused))


@asynccontextmanager
async def running(orchestrator: Orchestrator, tmp_path: Path) -> AsyncIterator[RunDir]:
    config = ServiceConfig(run_id="run", run_dir=tmp_path, listen=ListenConfig(), drain_timeout_s=1.0)
    add = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
    run_service = (run_pb2_grpc.add_RunServiceServicer_to_server, RunService(orchestrator), "RunService")
    server, port = build_server(config, [(add, orchestrator, "RolloutService"), run_service])
    await server.start()
    run = RunDir(tmp_path)
    write_endpoints(run.endpoints_file, {"orchestrator": f"127.0.0.1:{port}"})
    run.config_file.write_text("")
    run.token_file.write_text("token")
    run.token_file.chmod(0o600)
    try:
        yield run
    finally:
        await server.stop(None)


def asked(run: RunDir, problems: int, parallel: int = 4) -> Any:
    words = cast(Any, SimpleNamespace(name="words", temperature=1.0, max_new_tokens=4, deadline_s=60.0))
    return evaluate_run(run, [(words, problems)], Asking(1, None, 0, parallel), lambda done, of: None)


async def test_what_an_orchestrator_forgot_is_asked_again(tmp_path: Path) -> None:
    orchestrator = Orchestrator(forgets=2)
    async with running(orchestrator, tmp_path) as run, asyncio.timeout(GIVE_UP_S):
        answers = (await asked(run, 3))["words"]
    assert (len(answers.problems), answers.failed) == (3, 0)
    assert all(samples[0].correct for samples in answers.problems)
    assert len(set(orchestrator.created)) == len(orchestrator.created) == 5


async def test_what_nobody_waits_for_any_more_is_cancelled(tmp_path: Path) -> None:
    orchestrator = Orchestrator(answers=False)
    async with running(orchestrator, tmp_path) as run, asyncio.timeout(GIVE_UP_S):
        asking = asyncio.ensure_future(asked(run, 5, parallel=2))
        while len(orchestrator.looked_at) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait([asking])
    assert asking.cancelled()
    assert sorted(orchestrator.cancelled) == ["external-1", "external-2"]


async def test_a_run_that_stays_paused_is_given_up_with_its_reason_and_what_can_be_asked(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(evaluate_run_module, "PAUSED_S", 0.5)
    orchestrator = Orchestrator(answers=False, paused="lunch")
    async with running(orchestrator, tmp_path) as run, asyncio.timeout(GIVE_UP_S):
        with pytest.raises(LauncherError, match=r"is paused \(lunch\), and answers nothing until it goes on$"):
            await asked(run, 2)
        saved = tmp_path / "checkpoints" / "1.2"
        saved.mkdir(parents=True)
        (saved / "COMPLETE").touch()
        with pytest.raises(LauncherError, match=r"goes on; a checkpoint can be asked: .* --checkpoint newest$"):
            await asked(run, 2)


async def test_a_run_that_answers_nothing_is_given_up_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(evaluate_run_module, "AWAY_S", -179.0)  # less three times the environment's deadline: 1 s
    orchestrator = Orchestrator(answers=False)
    async with running(orchestrator, tmp_path) as run, asyncio.timeout(GIVE_UP_S):
        with pytest.raises(LauncherError, match="has answered nothing for"):
            await asked(run, 2)
