"""`slipstream eval` on a run that is up, whose orchestrator is started again, or whose user has enough."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from slipstream.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc, runner_pb2
from slipstream.common.config import ListenConfig, ServiceConfig
from slipstream.common.errors import RolloutUnknown
from slipstream.common.runtime import build_server
from slipstream.launcher.evaluate_run import Asking, evaluate_run
from slipstream.launcher.ports import write_endpoints
from slipstream.launcher.rundir import RunDir

GIVE_UP_S = 30.0


class Orchestrator(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers groups, but for the first so many, which it forgets; or none at all."""

    def __init__(self, *, forgets: int = 0, answers: bool = True) -> None:
        self.forgets, self.answers = forgets, answers
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


@asynccontextmanager
async def running(orchestrator: Orchestrator, tmp_path: Path) -> AsyncIterator[RunDir]:
    config = ServiceConfig(run_id="run", run_dir=tmp_path, listen=ListenConfig(), drain_timeout_s=1.0)
    add = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
    server, port = build_server(config, [(add, orchestrator, "RolloutService")])
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
    words = cast(Any, SimpleNamespace(name="words", temperature=1.0, max_new_tokens=4))
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
