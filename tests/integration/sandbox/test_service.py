"""Leases, files, lines and streams of the sandbox executor, over real gRPC."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import grpc
import pytest
from prometheus_client import REGISTRY

from slipstream.api.sandbox.v1 import sandbox_pb2, sandbox_pb2_grpc
from slipstream.common import errors
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.errors import from_rpc_error
from slipstream.common.sandbox_client import SandboxClient, SandboxLimits

FOREVER = ["python3", "-I", "-S", "-c", "print('up', flush=True)\nwhile True: pass"]
LONG = sandbox_pb2.Limits(wall_ms=500_000, cpu_ms=500_000)
"""So that what runs for ever does not end by itself while somebody waits for its end."""
DEADLINE_S = 30.0
"""For what takes milliseconds where nothing else runs."""


async def create(running, **fields) -> str:
    request = sandbox_pb2.CreateSandboxRequest(request_id=uuid4().hex, **{"limits": LONG, **fields})
    return (await running.stub.CreateSandbox(request)).sandbox.sandbox_id


async def outcome(call) -> int:
    return [message async for message in call][-1].result.outcome


async def first_output(call) -> bytes:
    return (await anext(aiter(call))).stdout


async def test_output_streams_while_the_program_runs(start_executor):
    async with start_executor() as running:
        call = running.stub.Exec(sandbox_pb2.ExecRequest(sandbox_id=await create(running), argv=FOREVER))
        assert await first_output(call) == b"up\n"
        assert running.executor.pool.running_count == 1
        call.cancel()


async def test_ending_the_call_kills_the_program(start_executor):
    async with start_executor() as running:
        call = running.stub.Exec(sandbox_pb2.ExecRequest(sandbox_id=await create(running), argv=FOREVER))
        await first_output(call)
        call.cancel()
        await running.idle()


async def test_the_calls_deadline_ends_the_program(start_executor):
    async with start_executor() as running:
        request = sandbox_pb2.ExecRequest(sandbox_id=await create(running), argv=FOREVER)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await outcome(running.stub.Exec(request, timeout=0.5))
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await running.idle()


async def test_a_lease_that_nobody_renews_takes_its_programs_along(start_executor):
    async with start_executor() as running:
        sandbox_id = await create(running)
        call = running.stub.Exec(sandbox_pb2.ExecRequest(sandbox_id=sandbox_id, argv=FOREVER))
        await first_output(call)
        running.executor.table.get(sandbox_id).lease_ttl_s = 0.4  # it was longer, for a machine that starts slowly
        await running.stub.RenewLease(sandbox_pb2.RenewLeaseRequest(sandbox_id=sandbox_id))
        assert await outcome(call) == sandbox_pb2.OUTCOME_EXPIRED
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.RenewLease(sandbox_pb2.RenewLeaseRequest(sandbox_id=sandbox_id))
        assert isinstance(from_rpc_error(error.value), errors.SandboxUnknown)
        assert len(running.executor.table) == 0


async def test_the_client_keeps_its_lease_through_a_long_program(start_executor):
    async with start_executor() as running:
        client = SandboxClient(running.address, Access(), lease_ttl_s=2.0)
        assert (await client.run_python("import time; time.sleep(3.0)")).ok
        assert (await running.stub.GetCapacity(sandbox_pb2.GetCapacityRequest())).executions == 1, "it was run once"
        await client.close()


async def test_the_client_makes_a_new_sandbox_when_its_own_is_gone(start_executor):
    async with start_executor() as running:
        assert (await running.client.run_python("pass")).ok
        for sandbox in (await running.stub.ListSandboxes(sandbox_pb2.ListSandboxesRequest())).sandboxes:
            await running.stub.DeleteSandbox(sandbox_pb2.DeleteSandboxRequest(sandbox_id=sandbox.sandbox_id))
        assert (await running.client.run_python("pass")).ok


async def test_deleting_a_sandbox_ends_running_and_waiting_programs(start_executor):
    async with start_executor(max_running_execs=1) as running:
        sandbox_id = await create(running)
        calls = [running.stub.Exec(sandbox_pb2.ExecRequest(sandbox_id=sandbox_id, argv=FOREVER)) for _ in range(3)]
        await running.until(lambda pool: pool.waiting_count == 2)
        request = sandbox_pb2.DeleteSandboxRequest(sandbox_id=sandbox_id)
        assert (await running.stub.DeleteSandbox(request)).found
        assert not (await running.stub.DeleteSandbox(request)).found
        assert await asyncio.gather(*map(outcome, calls)) == [sandbox_pb2.OUTCOME_EXPIRED] * 3


async def test_beyond_the_line_execs_are_refused(start_executor):
    async with start_executor(max_running_execs=1, max_waiting_execs=1) as running:
        request = sandbox_pb2.ExecRequest(sandbox_id=await create(running), argv=FOREVER)
        calls = [running.stub.Exec(request) for _ in range(2)]
        await running.until(lambda pool: len(pool.open) == 2)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await outcome(running.stub.Exec(request))
        assert isinstance(from_rpc_error(error.value), errors.SandboxQueueFull)
        for call in calls:
            call.cancel()


async def test_who_leaves_the_line_leaves_no_place_in_it_and_is_not_counted(start_executor):
    async with start_executor(max_running_execs=1, max_waiting_execs=4) as running:
        request = sandbox_pb2.ExecRequest(sandbox_id=await create(running), argv=FOREVER)
        first = running.stub.Exec(request)
        await running.until(lambda pool: pool.running_count == 1)
        for _ in range(5):
            waiting = [running.stub.Exec(request) for _ in range(4)]
            await running.until(lambda pool: len(pool.open) == 5)
            for call in waiting:
                call.cancel()
            await running.until(lambda pool: len(pool.open) == 1)
        assert not running.executor.pool._line
        assert REGISTRY.get_sample_value("slipstream_sandbox_waiting_execs") == 0
        first.cancel()


async def test_a_client_waits_while_the_line_is_full_and_each_of_its_programs_runs(start_executor):
    async with start_executor(max_running_execs=1, max_waiting_execs=1) as running:
        results = await asyncio.gather(*(running.client.run_python(f"print({i})") for i in range(6)))
        assert [result.stdout for result in results] == [b"%d\n" % i for i in range(6)]


@pytest.mark.parametrize("left", [0, 1, 4])
async def test_an_executor_that_may_open_no_more_files_loses_no_place_and_blames_no_program(
    start_executor, open_files, left
):
    async with start_executor(max_running_execs=2) as running:
        request = sandbox_pb2.ExecRequest(sandbox_id=await create(running), argv=["/bin/true"])
        await outcome(running.stub.Exec(request))
        open_files.exhaust(but=left)
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await outcome(running.stub.Exec(request))
            assert isinstance(from_rpc_error(error.value), errors.TooManyFiles)
        open_files.free()
        await running.until(lambda pool: not pool.running_count and not pool.open)
        assert await outcome(running.stub.Exec(request)) == sandbox_pb2.OUTCOME_EXITED


async def test_a_reader_that_does_not_read_holds_up_nobody(start_executor):
    async with start_executor(max_running_execs=1) as running:
        sandbox_id = await create(running, limits=sandbox_pb2.Limits(output_bytes=8 << 20, wall_ms=500_000))
        loud = ["python3", "-I", "-S", "-c", "import sys\nfor i in range(6): sys.stdout.write('y' * (1 << 20))"]
        unread = running.stub.Exec(sandbox_pb2.ExecRequest(sandbox_id=sandbox_id, argv=loud))
        for _ in range(3):
            assert (await running.client.run_python("print(1)", timeout_s=DEADLINE_S)).stdout == b"1\n"
        messages = [message async for message in unread]
        assert sum(len(message.stdout) for message in messages) == 6 << 20
        assert messages[-1].result.outcome == sandbox_pb2.OUTCOME_EXITED


async def test_a_repeated_create_answers_the_same_sandbox(start_executor):
    async with start_executor() as running:
        request = sandbox_pb2.CreateSandboxRequest(request_id="one")
        ids = {(await running.stub.CreateSandbox(request)).sandbox.sandbox_id for _ in range(2)}
        assert len(ids) == 1
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.CreateSandbox(sandbox_pb2.CreateSandboxRequest(request_id="one", lease_ttl_ms=1))
        assert isinstance(from_rpc_error(error.value), errors.RequestIdReused)


async def test_files_written_are_seen_by_programs_read_only(start_executor):
    async with start_executor(max_files_bytes=1000) as running:
        sandbox_id = await create(running)
        files = [sandbox_pb2.File(path="a/b.txt", data=b"one"), sandbox_pb2.File(path="c", data=b"two")]
        await running.stub.WriteFiles(sandbox_pb2.WriteFilesRequest(sandbox_id=sandbox_id, files=files))
        argv = ["/bin/sh", "-c", "cat /files/a/b.txt /files/c; echo x > /files/c"]
        call = running.stub.Exec(sandbox_pb2.ExecRequest(sandbox_id=sandbox_id, argv=argv))
        messages = [message async for message in call]
        assert messages[0].stdout == b"onetwo"
        assert messages[-1].result.exit_code == 2
        read = await running.stub.ReadFiles(sandbox_pb2.ReadFilesRequest(sandbox_id=sandbox_id, paths=["c"]))
        assert read.files == files[1:]
        big = [sandbox_pb2.File(path="big", data=bytes(1000))]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.WriteFiles(sandbox_pb2.WriteFilesRequest(sandbox_id=sandbox_id, files=big))
        assert isinstance(from_rpc_error(error.value), errors.SandboxFilesFull)


@pytest.mark.parametrize("paths", [["a", "a/b"], ["a/b/c", "a"], ["a/b/c", "a/b"]])
async def test_a_file_cannot_hold_another(start_executor, paths):
    async with start_executor() as running:
        sandbox_id = await create(running)
        *first, last = (
            sandbox_pb2.WriteFilesRequest(sandbox_id=sandbox_id, files=[sandbox_pb2.File(path=path)]) for path in paths
        )
        for request in first:
            await running.stub.WriteFiles(request)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.WriteFiles(last)
        assert isinstance(from_rpc_error(error.value), errors.InvalidRequest)
        argv = ["/bin/sh", "-c", "exit 7"]
        call = running.stub.Exec(sandbox_pb2.ExecRequest(sandbox_id=sandbox_id, argv=argv))
        assert [message async for message in call][-1].result.exit_code == 7


async def test_sandboxes_are_listed_in_pages_and_bounded(start_executor):
    async with start_executor(max_sandboxes=3) as running:
        ids = sorted([await create(running) for _ in range(3)])
        page = await running.stub.ListSandboxes(sandbox_pb2.ListSandboxesRequest(page_size=2))
        rest = await running.stub.ListSandboxes(
            sandbox_pb2.ListSandboxesRequest(page_size=2, page_token=page.next_page_token)
        )
        assert [sandbox.sandbox_id for sandbox in (*page.sandboxes, *rest.sandboxes)] == ids
        assert rest.next_page_token == ""
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await create(running)
        assert isinstance(from_rpc_error(error.value), errors.SandboxesFull)


async def test_a_limit_above_the_executors_is_refused(start_executor):
    async with start_executor() as running:
        with pytest.raises(errors.InvalidRequest) as error:
            await running.client.run_python("pass", limits=SandboxLimits(wall_s=1e6))
        assert error.value.metadata["field"] == "limits.wall_ms"


@pytest.mark.parametrize("method", ["Snapshot", "Fork"])
async def test_what_is_not_there_yet_says_so(start_executor, method):
    async with start_executor() as running:
        request = getattr(sandbox_pb2, f"{method}Request")(request_id="r", sandbox_id="s")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await getattr(running.stub, method)(request)
        assert isinstance(from_rpc_error(error.value), errors.Unsupported)


async def test_capacity_is_told(start_executor):
    async with start_executor(max_running_execs=1, accounting="supervisor") as running:
        await running.client.run_python("pass")
        capacity = await running.stub.GetCapacity(sandbox_pb2.GetCapacityRequest())
        assert (capacity.accounting, capacity.max_running_execs, capacity.executions) == ("supervisor", 1, 1)
        assert capacity.own_uid == (os.geteuid() == 0)


class Process:
    """The service as a process of its own."""

    def __init__(self, tmp_path: Path, *options: str, uid: int | None = None) -> None:
        arguments = [f"--run-dir={tmp_path}", f"--log.file={tmp_path / 'log'}", "--listen.port=0", *options]
        command = [sys.executable, "-m", "slipstream.sandbox", *arguments]
        self.log = tmp_path / "log"
        self.process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, user=uid, group=uid)

    def address(self) -> str:
        deadline_s = time.monotonic() + 2 * DEADLINE_S  # it imports much
        while True:
            for line in self.log.read_text().splitlines() if self.log.exists() else []:
                if '"service_started"' in line:
                    return "127.0.0.1:" + line.partition('"port": ')[2].partition(",")[0]
            assert time.monotonic() < deadline_s
            assert self.process.poll() is None, self.process.stderr
            time.sleep(0.02)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def process(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    process = Process(tmp_path)
    yield process
    process.end()


def below(pid: int) -> set[int]:
    """All processes below `pid`. Any of them may end meanwhile."""
    found: set[int] = set()
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                found.update(map(int, (task / "children").read_text().split()))
    return found | {deeper for child in found for deeper in below(child)}


def alive(pid: int) -> bool:
    """Whether it does anything; a zombie only waits for the machine's first process to look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def wait_until_gone(pids: set[int]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while left := [pid for pid in pids if alive(pid)]:  # noqa: ASYNC110
            await asyncio.sleep(0.02 * len(left))


@pytest.mark.parametrize("pause_s", [0.0, 0.002, 0.004, 0.3])
async def test_an_executor_that_is_killed_leaves_no_program(process, pause_s):
    """At whatever moment: while bubblewrap starts, while the gate waits, while the program runs."""
    async with open_channel(process.address(), Access()) as channel:
        stub = sandbox_pb2_grpc.SandboxServiceStub(channel)
        created = await stub.CreateSandbox(sandbox_pb2.CreateSandboxRequest(request_id="r", limits=LONG))
        request = sandbox_pb2.ExecRequest(sandbox_id=created.sandbox.sandbox_id, argv=FOREVER)
        idle = below(process.process.pid)  # the warden
        calls = [stub.Exec(request) for _ in range(2)]
        while (pids := below(process.process.pid)) == idle:  # noqa: ASYNC110
            await asyncio.sleep(0.0005)
        await asyncio.sleep(pause_s)
        pids |= below(process.process.pid)
        process.process.send_signal(signal.SIGKILL)
        process.process.wait()
        await wait_until_gone(pids)
        for call in calls:
            call.cancel()


async def test_sigterm_ends_the_service_and_its_programs_within_the_drain_timeout(process):
    async with open_channel(process.address(), Access()) as channel:
        stub = sandbox_pb2_grpc.SandboxServiceStub(channel)
        created = await stub.CreateSandbox(sandbox_pb2.CreateSandboxRequest(request_id="r", limits=LONG))
        call = stub.Exec(sandbox_pb2.ExecRequest(sandbox_id=created.sandbox.sandbox_id, argv=FOREVER))
        await first_output(call)
        pids = below(process.process.pid)
        process.process.send_signal(signal.SIGTERM)
        assert await outcome(call) == sandbox_pb2.OUTCOME_CANCELLED
        assert process.process.wait(timeout=DEADLINE_S) == 0
        await wait_until_gone(pids)
    assert not list(Path("/sys/fs/cgroup").glob(f"**/slipstream-sandbox-{process.process.pid}"))
