"""Client of the sandbox executor for code that wants something run: one sandbox, kept alive, made anew when it is gone.

async with SandboxClient("127.0.0.1:7000", access) as sandbox:
    result = await sandbox.run_python("print(1 + 1)")
    assert result.ok and result.stdout == b"2\\n"
"""

# The generated stubs do not say what their calls return.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Self, TypeVar
from uuid import uuid4

import grpc
import structlog

from slipstream.api.sandbox.v1 import sandbox_pb2, sandbox_pb2_grpc
from slipstream.common import tracing
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.errors import (
    Draining,
    SandboxesFull,
    SandboxQueueFull,
    SandboxUnknown,
    SlipstreamError,
    TooManyFiles,
    Unreachable,
    from_rpc_error,
)

log = structlog.get_logger()

LEASE_TTL_S = 60.0
RENEW_TIMEOUT_S = 10.0
FILES_TIMEOUT_S = 30.0
# Beside the program's own time: waiting for a place, the way there and back.
QUEUE_TIMEOUT_S = 60.0
DEFAULT_WALL_S = 10.0
AWAY_TIMEOUT_S = 30.0
"""How long an executor may be away, such as between two of its processes."""
AWAY_PAUSE_S = 0.2
FULL_PAUSE_S = 1.0
FULL = (SandboxQueueFull, SandboxesFull, TooManyFiles)
"""What passes when other programs end."""
MAX_ARGUMENT_BYTES = 100_000
_ENDED_WITH_IT = ("expired", "cancelled")
"""Outcomes of programs that were killed as their sandbox, or the executor, went."""

T = TypeVar("T")


@dataclass(frozen=True)
class SandboxLimits:
    """What a program may use; 0 is the executor's default."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    memory_bytes: int = 0
    process_count: int = 0
    output_bytes: int = 0

    def to_proto(self) -> sandbox_pb2.Limits:
        return sandbox_pb2.Limits(
            wall_ms=round(self.wall_s * 1000),
            cpu_ms=round(self.cpu_s * 1000),
            memory_bytes=self.memory_bytes,
            process_count=self.process_count,
            output_bytes=self.output_bytes,
        )


@dataclass(frozen=True)
class ExecResult:
    """How a program ended and what it wrote."""

    outcome: str
    """The contract's name in lower case: "exited", "signaled", "wall_limit", "memory_limit", ..."""
    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool
    cpu_s: float
    wall_s: float
    max_memory_bytes: int
    message: str

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, with exit code 0."""
        return self.outcome == "exited" and self.exit_code == 0


class SandboxClient:
    """One sandbox at one executor. Calls may run side by side. Its lease is renewed before and during calls.

    A sandbox that is gone is made anew, with the files that were written to it: since programs cannot write any, it is
    the same for whoever uses it. An executor that is away is waited for.
    """

    def __init__(
        self,
        address: str,
        access: Access,
        lease_ttl_s: float = LEASE_TTL_S,
        away_timeout_s: float = AWAY_TIMEOUT_S,
    ) -> None:
        """`away_timeout_s`: how long calls wait for an executor that is away."""
        self._away_timeout_s = away_timeout_s
        self.away = False
        """Whether the executor did not answer when it was asked last."""
        self._address, self._access = address, access
        self._files: dict[str, bytes] = {}
        self._channel = open_channel(address, access)
        self._stub = sandbox_pb2_grpc.SandboxServiceStub(self._channel)
        self._lease_ttl_s = lease_ttl_s
        self._sandbox_id = ""
        self._renew_s = 0.0
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Delete the sandbox, if the executor still answers, and close the channel."""
        try:
            if self._sandbox_id:
                request = sandbox_pb2.DeleteSandboxRequest(sandbox_id=self._sandbox_id)
                await self._stub.DeleteSandbox(request, timeout=RENEW_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            self._sandbox_id = ""  # its lease ends it
        finally:
            await self._channel.close()

    def session(self) -> SandboxClient:
        """Another sandbox at the same executor, for a caller who closes it."""
        return SandboxClient(self._address, self._access, self._lease_ttl_s, self._away_timeout_s)

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Put files under /files, for programs that start later. Raises `SlipstreamError`."""
        before = self._files.copy()
        self._files.update(files)

        async def write() -> None:
            sandbox_id = await self._sandbox()
            try:
                await self._write(sandbox_id, files)
            except grpc.aio.AioRpcError as error:
                if not isinstance(from_rpc_error(error), SandboxUnknown):
                    raise
                await self._sandbox(gone=sandbox_id)  # made anew, with all files

        try:
            await self._while_away(write)
        except SlipstreamError:  # a sandbox that is made anew would be refused with them
            for path in files:
                if self._files.get(path) is files[path]:
                    self._files.pop(path)
                    if path in before:
                        self._files[path] = before[path]
            raise

    async def read_files(self, paths: Sequence[str]) -> list[bytes]:
        """Files under /files as the executor has them, in order. Raises `SlipstreamError`."""

        async def read() -> list[bytes]:
            sandbox_id = await self._sandbox()
            try:
                return await self._read(sandbox_id, paths)
            except grpc.aio.AioRpcError as error:
                if not isinstance(from_rpc_error(error), SandboxUnknown):
                    raise
            return await self._read(await self._sandbox(gone=sandbox_id), paths)

        return await self._while_away(read)

    async def _read(self, sandbox_id: str, paths: Sequence[str]) -> list[bytes]:
        request = sandbox_pb2.ReadFilesRequest(sandbox_id=sandbox_id, paths=paths)
        response = await self._stub.ReadFiles(request, timeout=FILES_TIMEOUT_S)
        return [file.data for file in response.files]

    async def _while_away(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call again while the executor is away, up to `away_timeout_s`, or full, for `QUEUE_TIMEOUT_S`.

        Raises `SlipstreamError`.
        """
        failed_since_s: float | None = None
        while True:
            try:
                answer = await call()
            except grpc.aio.AioRpcError as error:
                rebuilt, now_s = from_rpc_error(error), time.monotonic()
                self.away = isinstance(rebuilt, (Unreachable, Draining))
                failed_since_s = failed_since_s or now_s
                full = isinstance(rebuilt, FULL)
                patience_s = self._away_timeout_s if self.away else QUEUE_TIMEOUT_S if full else -1.0
                if now_s - failed_since_s > patience_s:
                    raise rebuilt from None
            else:
                self.away = False
                return answer
            # Many wait for room at once: they need not all ask at once.
            await asyncio.sleep(random.uniform(AWAY_PAUSE_S, FULL_PAUSE_S) if full else AWAY_PAUSE_S)

    async def _write(self, sandbox_id: str, files: Mapping[str, bytes]) -> None:
        written = [sandbox_pb2.File(path=path, data=data) for path, data in files.items()]
        request = sandbox_pb2.WriteFilesRequest(sandbox_id=sandbox_id, files=written)
        await self._stub.WriteFiles(request, timeout=FILES_TIMEOUT_S)

    async def run_python(
        self, source: str, stdin: bytes = b"", limits: SandboxLimits | None = None, timeout_s: float | None = None
    ) -> ExecResult:
        """Run `source` with the executor's Python: isolated, without site-packages. See `run`."""
        if len(source.encode()) <= MAX_ARGUMENT_BYTES:
            return await self.run(["python3", "-I", "-S", "-c", source], stdin, limits, timeout_s=timeout_s)
        if stdin:
            raise ValueError(f"a program above {MAX_ARGUMENT_BYTES} bytes takes standard input itself")
        return await self.run(["python3", "-I", "-S", "-"], source.encode(), limits, timeout_s=timeout_s)

    async def run(
        self,
        argv: Sequence[str],
        stdin: bytes = b"",
        limits: SandboxLimits | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> ExecResult:
        """Run one program and return its end; that it failed is in the result. Raises `SlipstreamError`.

        A sandbox that is gone is made anew, once. An executor that is away is waited for, up to `away_timeout_s`, and
        the program is run again where it was ended with it. `timeout_s` bounds waiting for a place too; it is by
        default a minute longer than the program's wall time.
        """
        limits = limits or SandboxLimits()
        if timeout_s is None:
            timeout_s = (limits.wall_s or DEFAULT_WALL_S) + QUEUE_TIMEOUT_S
        request = sandbox_pb2.ExecRequest(argv=argv, stdin=stdin, limits=limits.to_proto(), env=env)
        with tracing.span("sandbox_run"):
            return await self._while_away(lambda: self._run_once(request, timeout_s))

    async def _run_once(self, request: sandbox_pb2.ExecRequest, timeout_s: float) -> ExecResult:
        request.sandbox_id = await self._sandbox()
        try:
            result = await self._exec(request, timeout_s)
            if result.outcome not in _ENDED_WITH_IT:
                return result
        except grpc.aio.AioRpcError as error:
            if not isinstance(from_rpc_error(error), SandboxUnknown):
                raise
        request.sandbox_id = await self._sandbox(gone=request.sandbox_id)
        return await self._exec(request, timeout_s)

    async def _exec(self, request: sandbox_pb2.ExecRequest, timeout_s: float) -> ExecResult:
        failure: grpc.aio.AioRpcError | None = None
        async with asyncio.TaskGroup() as group:
            keeper = group.create_task(self._keep_lease())
            try:
                return await self._collect(request, timeout_s)
            except grpc.aio.AioRpcError as error:  # bare, not in an exception group
                failure = error
            finally:
                keeper.cancel()
        raise failure

    async def _keep_lease(self) -> NoReturn:
        """Renew while a program runs that may outlast the lease."""
        while True:
            await asyncio.sleep(self._lease_ttl_s / 3)
            try:
                await self._sandbox()
            except grpc.aio.AioRpcError as error:
                log.info("sandbox_not_renewed", reason=from_rpc_error(error).reason)

    async def _collect(self, request: sandbox_pb2.ExecRequest, timeout_s: float) -> ExecResult:
        stdout, stderr = [], []
        end = None
        async for message in self._stub.Exec(request, timeout=timeout_s):
            kind = message.WhichOneof("event")
            if kind == "stdout":
                stdout.append(message.stdout)
            elif kind == "stderr":
                stderr.append(message.stderr)
            else:
                end = message.result
        if end is None:
            raise SlipstreamError("the executor ended the stream without a result")
        return ExecResult(
            outcome=sandbox_pb2.Outcome.Name(end.outcome).removeprefix("OUTCOME_").lower(),
            exit_code=end.exit_code,
            stdout=b"".join(stdout),
            stderr=b"".join(stderr),
            truncated=end.truncated,
            cpu_s=end.cpu_s,
            wall_s=end.wall_s,
            max_memory_bytes=end.max_memory_bytes,
            message=end.message,
        )

    async def _sandbox(self, gone: str | None = None) -> str:
        """The sandbox to use: renewed when a third of its lease is over, created when there is none or it is gone."""
        async with self._lock:
            if self._sandbox_id == gone:
                self._sandbox_id = ""
            now_s = time.monotonic()
            if self._sandbox_id and now_s >= self._renew_s:
                await self._renew()
            if not self._sandbox_id:
                request = sandbox_pb2.CreateSandboxRequest(
                    request_id=uuid4().hex, lease_ttl_ms=round(self._lease_ttl_s * 1000)
                )
                response = await self._stub.CreateSandbox(request, timeout=RENEW_TIMEOUT_S)
                if self._files:
                    await self._write(response.sandbox.sandbox_id, self._files)
                self._sandbox_id = response.sandbox.sandbox_id
                self._renew_s = now_s + self._lease_ttl_s / 3
            return self._sandbox_id

    async def _renew(self) -> None:
        request = sandbox_pb2.RenewLeaseRequest(sandbox_id=self._sandbox_id)
        renew_s = time.monotonic() + self._lease_ttl_s / 3
        try:
            await self._stub.RenewLease(request, timeout=RENEW_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if not isinstance(from_rpc_error(error), SandboxUnknown):
                raise
            self._sandbox_id = ""
        else:
            self._renew_s = renew_s
