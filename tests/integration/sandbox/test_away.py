"""A sandbox executor that is away for a while, as between two of its processes, costs its callers time alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from slipstream.api.sandbox.v1 import sandbox_pb2, sandbox_pb2_grpc
from slipstream.common.auth import Access
from slipstream.common.errors import Draining, InvalidRequest, SandboxUnknown, SlipstreamError
from slipstream.common.runtime import build_server
from slipstream.common.sandbox_client import SandboxClient


class Restarting(sandbox_pb2_grpc.SandboxServiceServicer):
    """Is not there for so many calls, of either kind."""

    def __init__(self, creations: int, executions: int, files: int = 0) -> None:
        self.away = {"create": creations, "exec": executions, "files": files}
        self.sandboxes: list[str] = []
        self.files: dict[str, dict[str, bytes]] = {}
        """By sandbox."""
        self.endings: list[sandbox_pb2.Outcome] = []
        """Of programs, before all end well."""

    async def CreateSandbox(self, request: Any, context: Any) -> sandbox_pb2.CreateSandboxResponse:
        self._refuse("create")
        self.sandboxes.append(f"sandbox-{len(self.sandboxes)}")
        return sandbox_pb2.CreateSandboxResponse(sandbox=sandbox_pb2.Sandbox(sandbox_id=self.sandboxes[-1]))

    async def Exec(self, request: sandbox_pb2.ExecRequest, context: Any) -> AsyncIterator[sandbox_pb2.ExecResponse]:
        yield sandbox_pb2.ExecResponse(stdout=request.sandbox_id.encode())
        self._refuse("exec")
        outcome = self.endings.pop(0) if self.endings else sandbox_pb2.OUTCOME_EXITED
        yield sandbox_pb2.ExecResponse(result=sandbox_pb2.ExecResult(outcome=outcome))

    async def WriteFiles(self, request: Any, context: Any) -> sandbox_pb2.WriteFilesResponse:
        self._refuse("files")
        if any(file.path == "refused" for file in request.files):
            raise InvalidRequest("no such name", field="path")
        self.files.setdefault(request.sandbox_id, {}).update({file.path: file.data for file in request.files})
        return sandbox_pb2.WriteFilesResponse()

    async def ReadFiles(self, request: Any, context: Any) -> sandbox_pb2.ReadFilesResponse:
        self._refuse("files")
        if request.sandbox_id not in self.files:
            raise SandboxUnknown("of another process")
        kept = self.files[request.sandbox_id]
        files = [sandbox_pb2.File(path=path, data=kept[path]) for path in request.paths]
        return sandbox_pb2.ReadFilesResponse(files=files)

    async def DeleteSandbox(self, request: Any, context: Any) -> sandbox_pb2.DeleteSandboxResponse:
        return sandbox_pb2.DeleteSandboxResponse(found=True)

    def _refuse(self, kind: str) -> None:
        if self.away[kind]:
            self.away[kind] -= 1
            raise Draining("its next process does not listen yet")


@pytest.fixture
async def client_of(make_config) -> AsyncIterator[Any]:
    servers, clients = [], []

    async def start(servicer: Restarting, **options: float) -> SandboxClient:
        add = sandbox_pb2_grpc.add_SandboxServiceServicer_to_server
        server, port = build_server(make_config(), [(add, servicer, "slipstream.api.sandbox.v1.SandboxService")])
        await server.start()
        servers.append(server)
        clients.append(SandboxClient(f"127.0.0.1:{port}", Access(), **options))
        return clients[-1]

    yield start
    for client in clients:
        await client.close()
    for server in servers:
        await server.stop(None)


@pytest.mark.parametrize(("creations", "executions"), [(2, 0), (0, 2), (1, 1)])
async def test_a_program_is_run_once_the_executor_is_back_and_its_output_is_that_of_one_run(
    client_of, creations: int, executions: int
) -> None:
    servicer = Restarting(creations, executions)
    result = await (await client_of(servicer)).run_python("print(1)")
    assert (result.ok, result.stdout) == (True, b"sandbox-0")
    assert servicer.away == {"create": 0, "exec": 0, "files": 0}


async def test_files_wait_for_the_executor_and_are_those_of_a_sandbox_that_is_made_anew(client_of) -> None:
    servicer = Restarting(1, 0, files=2)
    client = await client_of(servicer)
    await client.write_files({"a": b"1"})
    servicer.away["files"] = 1
    assert await client.read_files(["a"]) == [b"1"]
    servicer.files.clear()  # its next process has other sandboxes
    assert await client.read_files(["a"]) == [b"1"]
    assert not client.away


@pytest.mark.parametrize("ending", [sandbox_pb2.OUTCOME_EXPIRED, sandbox_pb2.OUTCOME_CANCELLED])
async def test_a_program_that_was_killed_with_its_sandbox_is_run_in_another(client_of, ending: Any) -> None:
    servicer = Restarting(0, 0)
    client = await client_of(servicer)
    await client.write_files({"a": b"1"})
    servicer.endings = [ending]
    result = await client.run_python("print(1)")
    assert (result.ok, result.stdout) == (True, b"sandbox-1")
    assert servicer.files["sandbox-1"] == {"a": b"1"}


async def test_files_that_were_refused_are_none_of_a_sandbox_that_is_made_anew(client_of) -> None:
    servicer = Restarting(0, 0)
    client = await client_of(servicer)
    await client.write_files({"a": b"1"})
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            await client.write_files({"a": b"2", "refused": b"3"})
    servicer.endings = [sandbox_pb2.OUTCOME_EXPIRED]
    assert (await client.run_python("print(1)")).ok
    assert servicer.files["sandbox-1"] == {"a": b"1"}


async def test_one_that_stays_away_is_told_of(client_of) -> None:
    client = await client_of(Restarting(1 << 20, 0), away_timeout_s=0.3)
    with pytest.raises(SlipstreamError) as caught:
        await client.run_python("print(1)")
    assert isinstance(caught.value, Draining)
    assert client.away
