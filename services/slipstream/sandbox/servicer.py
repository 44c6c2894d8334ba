"""SandboxService: RPC to domain and back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import structlog

from slipstream.api.sandbox.v1 import sandbox_pb2, sandbox_pb2_grpc
from slipstream.common import tracing
from slipstream.common.channel import MAX_MESSAGE_BYTES
from slipstream.common.errors import InvalidRequest, RootfsUnknown, Unsupported
from slipstream.common.idempotency import RequestMemory
from slipstream.sandbox.config import LimitsConfig, SandboxConfig
from slipstream.sandbox.execution import ExecPool, Execution
from slipstream.sandbox.leases import Sandbox, SandboxTable
from slipstream.sandbox.program import Ended, Limits, Outcome, Program

log = structlog.get_logger()

PYTHON_ROOT = "python"
DEFAULT_LEASE_TTL_MS = 60_000
DEFAULT_PAGE_SIZE = 100
MAX_READ_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
"""Bytes of one answer of ReadFiles: a message has room for them and their paths."""
_FIELDS = {"wall_s": "wall_ms", "cpu_s": "cpu_ms"}
"""Names in the contract of limits that are called otherwise here."""
OUTCOMES = {outcome: f"OUTCOME_{outcome.name}" for outcome in Outcome}


class SandboxServicer(sandbox_pb2_grpc.SandboxServiceServicer):
    """Serves SandboxService over one table of sandboxes and one pool of places."""

    def __init__(
        self, config: SandboxConfig, table: SandboxTable, pool: ExecPool, accounting: str, own_uid: bool
    ) -> None:
        self._table = table
        self._pool = pool
        self._max_files_bytes = config.max_files_bytes
        self._default_limits = _from_config(config.default_limits)
        self._max_limits = _from_config(config.max_limits)
        self._accounting = accounting
        self._own_uid = own_uid
        self._memory = RequestMemory()

    async def CreateSandbox(
        self, request: sandbox_pb2.CreateSandboxRequest, context: grpc.aio.ServicerContext
    ) -> sandbox_pb2.CreateSandboxResponse:
        async def create() -> sandbox_pb2.CreateSandboxResponse:
            if request.rootfs.WhichOneof("source") == "oci_digest":
                raise Unsupported("this release runs no OCI images", method="CreateSandbox", field="rootfs.oci_digest")
            directory = request.rootfs.directory or PYTHON_ROOT
            if directory != PYTHON_ROOT:
                raise RootfsUnknown(f"no root {directory!r}", known=PYTHON_ROOT)
            default = merge_limits(request.limits, self._default_limits, self._max_limits)
            most = merge_limits(request.limits, self._max_limits, self._max_limits)
            ttl_s = (request.lease_ttl_ms or DEFAULT_LEASE_TTL_MS) / 1000
            sandbox = self._table.create(directory, default, most, ttl_s)
            return sandbox_pb2.CreateSandboxResponse(sandbox=_describe(sandbox))

        return await self._memory.once(request, create)

    async def RenewLease(
        self, request: sandbox_pb2.RenewLeaseRequest, context: grpc.aio.ServicerContext
    ) -> sandbox_pb2.RenewLeaseResponse:
        sandbox = self._table.get(request.sandbox_id)
        sandbox.renew()
        return sandbox_pb2.RenewLeaseResponse(lease_left_ms=int(sandbox.lease_left_s() * 1000))

    async def Exec(
        self, request: sandbox_pb2.ExecRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[sandbox_pb2.ExecResponse]:
        sandbox = self._table.get(request.sandbox_id)
        limits = merge_limits(request.limits, sandbox.default_limits, sandbox.max_limits)
        program = Program(list(request.argv), limits, dict(request.env), request.stdin, sandbox.files)
        execution = Execution(self._pool, program)
        sandbox.executions.add(execution)
        try:
            async with aclosing(execution.events()) as events:
                async for event in events:
                    if isinstance(event, Ended):
                        tracing.record("program", tracing.current(), event.wall_s, outcome=event.outcome.value,
                                       cpu_s=event.cpu_s, waited_s=execution.waited_s)  # fmt: skip
                        log.debug("exec_ended", request_id=request.request_id, outcome=event.outcome.value)
                        yield sandbox_pb2.ExecResponse(result=_result(event, execution.waited_s))
                    elif event[0] == "stdout":
                        yield sandbox_pb2.ExecResponse(stdout=event[1])
                    else:
                        yield sandbox_pb2.ExecResponse(stderr=event[1])
        finally:
            sandbox.executions.discard(execution)

    async def WriteFiles(
        self, request: sandbox_pb2.WriteFilesRequest, context: grpc.aio.ServicerContext
    ) -> sandbox_pb2.WriteFilesResponse:
        sandbox = self._table.get(request.sandbox_id)
        files = {file.path: file.data for file in request.files}
        self._table.write_files(sandbox, files, self._max_files_bytes)
        return sandbox_pb2.WriteFilesResponse(files_bytes=sandbox.files_bytes)

    async def ReadFiles(
        self, request: sandbox_pb2.ReadFilesRequest, context: grpc.aio.ServicerContext
    ) -> sandbox_pb2.ReadFilesResponse:
        sandbox = self._table.get(request.sandbox_id)
        contents = [sandbox.read_file(path) for path in request.paths]
        if sum(map(len, contents)) > MAX_READ_BYTES:
            raise InvalidRequest(f"{MAX_READ_BYTES} bytes at most", field="paths", limit=MAX_READ_BYTES)
        files = [sandbox_pb2.File(path=path, data=data) for path, data in zip(request.paths, contents, strict=True)]
        return sandbox_pb2.ReadFilesResponse(files=files)

    async def Snapshot(
        self, request: sandbox_pb2.SnapshotRequest, context: grpc.aio.ServicerContext
    ) -> sandbox_pb2.SnapshotResponse:
        raise Unsupported("this release keeps no state between programs but the files", method="Snapshot")

    async def Fork(
        self, request: sandbox_pb2.ForkRequest, context: grpc.aio.ServicerContext
    ) -> sandbox_pb2.ForkResponse:
        raise Unsupported("this release copies no sandboxes: create another and write its files", method="Fork")

    async def DeleteSandbox(
        self, request: sandbox_pb2.DeleteSandboxRequest, context: grpc.aio.ServicerContext
    ) -> sandbox_pb2.DeleteSandboxResponse:
        return sandbox_pb2.DeleteSandboxResponse(found=self._table.delete(request.sandbox_id))

    async def ListSandboxes(
        self, request: sandbox_pb2.ListSandboxesRequest, context: grpc.aio.ServicerContext
    ) -> sandbox_pb2.ListSandboxesResponse:
        size = request.page_size or DEFAULT_PAGE_SIZE
        page = self._table.page(request.page_token, size)
        more = len(page) > size
        page = page[:size]
        return sandbox_pb2.ListSandboxesResponse(
            sandboxes=[_describe(sandbox) for sandbox in page], next_page_token=page[-1].sandbox_id if more else ""
        )

    async def GetCapacity(
        self, request: sandbox_pb2.GetCapacityRequest, context: grpc.aio.ServicerContext
    ) -> sandbox_pb2.GetCapacityResponse:
        return sandbox_pb2.GetCapacityResponse(
            max_running_execs=self._pool.size,
            max_waiting_execs=self._pool.max_waiting,
            running_execs=self._pool.running_count,
            waiting_execs=self._pool.waiting_count,
            max_sandboxes=self._table.max_sandboxes,
            sandboxes=len(self._table),
            default_limits=_to_proto(self._default_limits),
            max_limits=_to_proto(self._max_limits),
            directories=[PYTHON_ROOT],
            accounting=self._accounting,
            own_uid=self._own_uid,
            executions=self._pool.ended_count,
        )


def merge_limits(asked: sandbox_pb2.Limits, default: Limits, most: Limits) -> Limits:
    """What was asked for, `default` where it is 0. Raises `InvalidRequest` above `most`."""
    values = {
        "wall_s": asked.wall_ms / 1000,
        "cpu_s": asked.cpu_ms / 1000,
        "memory_bytes": asked.memory_bytes,
        "process_count": asked.process_count,
        "output_bytes": asked.output_bytes,
        "tmp_bytes": asked.tmp_bytes,
    }
    for name, value in values.items():
        if value > getattr(most, name):
            limit = getattr(most, name)
            field = _FIELDS.get(name, name)
            limit = int(limit * 1000) if name in _FIELDS else limit
            raise InvalidRequest(f"limits: {field} is {limit} at most", field=f"limits.{field}", limit=limit)
        values[name] = value or getattr(default, name)
    return Limits(**values)


def _from_config(config: LimitsConfig) -> Limits:
    return Limits(**config.model_dump())


def _to_proto(limits: Limits) -> sandbox_pb2.Limits:
    return sandbox_pb2.Limits(
        wall_ms=int(limits.wall_s * 1000),
        cpu_ms=int(limits.cpu_s * 1000),
        memory_bytes=limits.memory_bytes,
        process_count=limits.process_count,
        output_bytes=limits.output_bytes,
        tmp_bytes=limits.tmp_bytes,
    )


def _describe(sandbox: Sandbox) -> sandbox_pb2.Sandbox:
    return sandbox_pb2.Sandbox(
        sandbox_id=sandbox.sandbox_id,
        rootfs=sandbox_pb2.Rootfs(directory=sandbox.directory),
        limits=_to_proto(sandbox.max_limits),
        lease_ttl_ms=int(sandbox.lease_ttl_s * 1000),
        lease_left_ms=int(sandbox.lease_left_s() * 1000),
        exec_count=len(sandbox.executions),
        files_bytes=sandbox.files_bytes,
    )


def _result(end: Ended, waited_s: float) -> sandbox_pb2.ExecResult:
    return sandbox_pb2.ExecResult(
        outcome=OUTCOMES[end.outcome],
        exit_code=end.exit_code,
        signal=end.signal,
        cpu_s=end.cpu_s,
        wall_s=end.wall_s,
        max_memory_bytes=end.max_memory_bytes,
        stdout_bytes=end.stdout_bytes,
        stderr_bytes=end.stderr_bytes,
        truncated=end.truncated,
        message=end.message,
        waited_s=waited_s,
    )
