"""The launcher follows a run and asks for its status over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import pytest

from slipstream.api.run.v1 import run_pb2, run_pb2_grpc
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.config import ServiceConfig
from slipstream.common.runtime import Service
from slipstream.launcher.errors import RunFailedError
from slipstream.launcher.ports import write_endpoints
from slipstream.launcher.progress import watch_run
from slipstream.launcher.rundir import create_run_dir
from slipstream.launcher.status import print_status, read_status, refusal


class ScriptedRun(run_pb2_grpc.RunServiceServicer):
    """Each watch streams the next part of a script; every part but the last breaks off."""

    def __init__(self, *parts: Sequence[run_pb2.Run]) -> None:
        self.parts = list(parts)

    async def WatchRun(self, request, context) -> AsyncIterator[run_pb2.WatchRunResponse]:
        for run in self.parts.pop(0):
            yield run_pb2.WatchRunResponse(run=run)
        if self.parts:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")

    async def GetRun(self, request, context) -> run_pb2.GetRunResponse:
        return run_pb2.GetRunResponse(run=run_pb2.Run(phase="training", step=3, total_steps=9, running_group_count=4))


@pytest.fixture
async def serve():
    services: list[Service] = []

    async def start(run: ScriptedRun, config: ServiceConfig | None = None) -> str:
        add = run_pb2_grpc.add_RunServiceServicer_to_server
        service = Service(config or ServiceConfig(), [(add, run, "slipstream.api.run.v1.RunService")])
        await service.start()
        services.append(service)
        return f"127.0.0.1:{service.port}"

    yield start
    for service in services:
        await service.server.stop(grace=None)


async def test_a_broken_watch_goes_on_until_the_run_has_ended(serve):
    running = run_pb2.Run(state=run_pb2.RUN_STATE_RUNNING, phase="training")
    finished = run_pb2.Run(state=run_pb2.RUN_STATE_FINISHED, phase="ended", step=9)
    address = await serve(ScriptedRun([running, running], [running, finished]))
    seen: list[int] = []
    async with open_channel(address, Access()) as channel:
        last = await watch_run(channel, lambda run: seen.append(run.state))
    assert last == finished
    assert len(seen) == 4


async def test_a_failed_run_tells_why(serve):
    failed = run_pb2.Run(state=run_pb2.RUN_STATE_FAILED, reason="no decode worker is left")
    async with open_channel(await serve(ScriptedRun([failed])), Access()) as channel:
        with pytest.raises(RunFailedError, match="no decode worker is left"):
            await watch_run(channel, lambda run: None)


async def test_status_shows_who_answers_and_who_is_away(serve, tmp_path: Path, capsys):
    run = create_run_dir(tmp_path, "demo")
    config = ServiceConfig.model_validate({"auth": {"token_file": run.token_file}})
    address = await serve(ScriptedRun(), config)
    run.config_file.touch()
    write_endpoints(run.endpoints_file, {"orchestrator": address, "router": "127.0.0.1:1"})
    rows = {row.replica: row for row in await read_status(run)}
    assert rows["orchestrator"].health == "serving"
    assert rows["orchestrator"].load == "training, step 3/9, 4 groups running"
    assert rows["router"].health == "away"
    print_status(run, list(rows.values()))
    assert "training, step 3/9" in capsys.readouterr().out


async def test_status_asks_over_the_connection_that_said_that_the_service_is_well(serve, between, tmp_path: Path):
    """The third one, after a look whether anybody listens and the health check, would be dropped."""
    run = create_run_dir(tmp_path, "demo")
    address = await serve(ScriptedRun(), ServiceConfig.model_validate({"auth": {"token_file": run.token_file}}))
    run.config_file.touch()
    write_endpoints(run.endpoints_file, {"orchestrator": await between(address, connections=2)})
    [row] = await read_status(run)
    assert (row.health, row.load) == ("serving", "training, step 3/9, 4 groups running")


async def test_a_wrong_token_is_told_and_no_success(serve, tmp_path: Path):
    run = create_run_dir(tmp_path, "demo")
    config = ServiceConfig.model_validate({"auth": {"token_file": run.token_file}})
    address = await serve(ScriptedRun(), config)
    run.config_file.touch()
    write_endpoints(run.endpoints_file, {"orchestrator": address, "router": "127.0.0.1:1"})
    assert refusal(run, await read_status(run)) == ""
    run.token_file.write_text("another one")
    sentence = refusal(run, await read_status(run))
    assert sentence.startswith("orchestrator refused the question: ")
    assert sentence.endswith(f"the token is read from {run.token_file}")
