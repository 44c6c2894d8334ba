"""Expert routes from a worker process to the trainer's reader of plans, over loopback: `--full` for 256 long rollouts.

256 rollouts of 32k tokens, 48 MoE layers and 8 experts a token are 3.2 GB of rows. A worker process serves them by its
RowsService, a runner's serves the tokens, and this process reads the plan as the trainer does, sequence by sequence,
each of which is compared with what was recorded. A part of the plan is read beside that over plain protobuf, and under
mutual TLS over one and over four connections.

With `--full` it fails below 1 GB/s, above 100 ms of event-loop lag (99th percentile, either end), or when memory grows
with the payload: an idle machine is wanted. Else 16 rollouts are read, and what depends on the machine's other work is
left out: lag counts the processor time of the loop's own thread, speed is processor time a gigabyte.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "services"))

import grpc
import numpy as np
import structlog
from loop_usage import Probe, Usage

from slipstream.api.inference.v1 import worker_pb2
from slipstream.api.rollout.v1 import rows_pb2, rows_pb2_grpc, runner_pb2
from slipstream.api.training.v1 import batch_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.auth import Access
from slipstream.common.channel import CHANNEL_OPTIONS, AioChannel, open_channel
from slipstream.common.config import ServiceConfig, TlsConfig
from slipstream.common.frames import FRAME_BYTES
from slipstream.common.rows import answer_rows
from slipstream.common.runtime import build_server, keep_freed_memory
from slipstream.common.tls import TlsMaterial
from slipstream.common.version import PolicyVersion
from slipstream.engine.base import Engine
from slipstream.engine.routes import RouteRows, RouteStore, route_dtype
from slipstream.engine.worker.identity import WorkerIdentity
from slipstream.engine.worker.rows import RowsHolder, RowsServicer
from slipstream.launcher.certs import make_certificates
from slipstream.runner.servicer import RowsServicer as RunnerRowsServicer
from slipstream.runner.spool import Rows, Spool
from slipstream.trainer.expert_rows import compiled_check
from slipstream.trainer.fetch import Download, RowsClient
from slipstream.trainer.portions import PlanReader
from slipstream.trainer.rows import RowForm
from slipstream.trainer.sequence import TrainSequence
from slipstream.trainer.torch_thread import TorchThread

SERVICE = "slipstream.api.rollout.v1.RowsService"
TOKENS, LAYERS, TOP_K, EXPERTS = 32768, 48, 8, 128
SHAPE = (LAYERS, TOP_K)
ROLLOUT_BYTES = (TOKENS - 1) * LAYERS * TOP_K
DISTINCT = 8
"""Rows are generated for so many rollouts, more than a processor's caches hold; the others refer to the same memory."""
WINDOW_BYTES = 64 << 20
GROWTH_LIMIT_BYTES = 4 * WINDOW_BYTES
"""The window, the sequences being stitched and those being used, and what the C library keeps for reuse."""
CPU_LIMIT_S_PER_GB = 6.0
"""Of both processes together: three times what it takes where little else runs."""
TIMEOUT_S = 300.0


def recorded(number: int) -> np.ndarray:
    """The rows of a rollout."""
    first = np.random.default_rng(number % DISTINCT).integers(0, EXPERTS, (TOKENS - 1, LAYERS, 1), np.uint8)
    return (first + 5 * np.arange(TOP_K, dtype=np.uint8)) % EXPERTS  # different ones for each token


class Recorder:
    """What RowsService asks of an engine, with the engines' own store."""

    def __init__(self, rollouts: int) -> None:
        self._store = RouteStore(1 << 40)
        rows = [recorded(number) for number in range(min(rollouts, DISTINCT))]
        for number in range(rollouts):
            self._store.put(f"r{number}", RouteRows(rows[number % DISTINCT], 0))

    def routes(self, key: str) -> RouteRows:
        return self._store.get(key)

    def release_routes(self, key: str) -> bool:
        return self._store.release(key)


class ProtobufServicer(rows_pb2_grpc.RowsServiceServicer):
    """The same answer by protobuf's own classes."""

    def __init__(self, holder: RowsHolder) -> None:
        self._holder = holder

    async def FetchRows(
        self, request: rows_pb2.FetchRowsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rows_pb2.FetchRowsResponse]:
        async with aclosing(answer_rows(request, self._holder.read)) as messages:
            yield rows_pb2.FetchRowsResponse.FromString(await anext(messages))
        for ref in request.refs:
            data = self._holder.read(ref).data
            for at in range(0, data.nbytes, FRAME_BYTES):
                yield rows_pb2.FetchRowsResponse(data=bytes(data[at : at + FRAME_BYTES]))


class ProtobufClient(RowsClient):
    """The same reader by protobuf's own classes."""

    async def _receive(self, holder: str, refs: Any, download: Download) -> None:
        stub = rows_pb2_grpc.RowsServiceStub(self._channels.get(holder))
        async for message in stub.FetchRows(rows_pb2.FetchRowsRequest(refs=refs)):
            if message.WhichOneof("frame") == "header":
                download.open(message.header, refs)
            else:
                download.take(memoryview(message.data))


async def serve(rollouts: int, tls_dir: Path) -> None:
    """The worker process: says its ports and then, for each line it reads, what it used since the last."""
    identity = WorkerIdentity("worker", worker_pb2.WORKER_ROLE_DECODE)
    holder = RowsHolder(cast(Engine, Recorder(rollouts)), identity)
    spool = Spool(tls_dir / "spool", 1 << 40)
    for number in range(rollouts):
        rows = {
            f"{name}/r{number}": Rows(np.full(TOKENS, -1 if name == "l" else 1, dtype).tobytes())
            for name, dtype in (("t", np.int32), ("l", np.float32))
        }
        await spool.keep(f"r{number}", runner_pb2.GroupReport(), rows)
    tls = TlsConfig.model_validate_json((tls_dir / "tls.json").read_text())
    ports = {}
    servers = []
    for name, servicer, config in (
        ("frames", RowsServicer(holder), ServiceConfig()),
        ("protobuf", ProtobufServicer(holder), ServiceConfig()),
        ("tls", RowsServicer(holder), ServiceConfig(tls=tls)),
        ("runner", RunnerRowsServicer(spool), ServiceConfig()),
    ):
        server, ports[name] = build_server(
            config, [(rows_pb2_grpc.add_RowsServiceServicer_to_server, servicer, SERVICE)]
        )
        await server.start()
        servers.append(server)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print(json.dumps(ports), flush=True)
    async with Probe() as probe:
        while await lines.readline():
            print(json.dumps(asdict(probe.take())), flush=True)
    for server in servers:
        await server.stop(None)


def plan(numbers: range, routes: str, runner: str) -> batch_pb2.Plan:
    """One rollout a micro-batch."""

    def ref(holder: str, key: str, dtype: str, count: int, row: tuple[int, ...] = ()) -> types_pb2.RowsRef:
        size_bytes = int(count * np.prod(row, dtype=int) * np.dtype(dtype).itemsize)
        span = types_pb2.RowRange(start=0, end=count)
        return types_pb2.RowsRef(
            holder=holder, key=key, dtype=dtype, ranges=[span], row_shape=row, size_bytes=size_bytes
        )

    sequences = [
        batch_pb2.PlannedSequence(
            rollout_id=f"r{number}",
            token_count=TOKENS,
            token_ids=ref(runner, f"t/r{number}", "int32", TOKENS),
            logprobs=ref(runner, f"l/r{number}", "float32", TOKENS),
            routes=[ref(routes, f"d/r{number}", "uint8", TOKENS - 1, SHAPE)],
        )
        for number in numbers
    ]
    return batch_pb2.Plan(micro_batches=[batch_pb2.MicroBatch(sequences=[sequence]) for sequence in sequences])


@dataclass(frozen=True)
class Figures:
    """One way of reading."""

    name: str
    gigabytes: float
    wall_s: float
    sender: Usage
    receiver: Usage

    @property
    def gigabytes_per_s(self) -> float:
        return self.gigabytes / self.wall_s

    @property
    def cpu_s_per_gigabyte(self) -> float:
        return (self.sender.cpu_s + self.receiver.cpu_s) / self.gigabytes


class Consumer:
    """This process: reads plans as the trainer does."""

    def __init__(self, worker: asyncio.subprocess.Process, ports: dict[str, int], tls: TlsConfig, probe: Probe) -> None:
        self._worker = worker
        self._ports = ports
        self._tls = tls
        self._probe = probe
        self._torch = TorchThread(1)
        self._expected = [recorded(number)[:: TOKENS // 7].copy() for number in range(DISTINCT)]

    async def measure(self, name: str, port: str, rollouts: int, streams: int = 1) -> Figures:
        await self._take()
        began_s = asyncio.get_running_loop().time()
        parts = [range(index, rollouts, streams) for index in range(streams)]
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            for numbers in parts:
                group.create_task(self._read(port, numbers, WINDOW_BYTES // streams))
        wall_s = asyncio.get_running_loop().time() - began_s
        sender, receiver = await self._take()
        return Figures(name, rollouts * ROLLOUT_BYTES / 1e9, wall_s, sender, receiver)

    async def _read(self, port: str, numbers: range, window_bytes: int) -> None:
        client_class = ProtobufClient if port == "protobuf" else RowsClient
        client = client_class(self._channel_opener(port), TIMEOUT_S)
        reader = PlanReader(client, self._torch, window_bytes)
        wanted = plan(numbers, f"127.0.0.1:{self._ports[port]}", f"127.0.0.1:{self._ports['runner']}")
        form = RowForm(SHAPE, route_dtype(EXPERTS), EXPERTS, vocab_size=2, trained=PolicyVersion(1, 0))
        left = iter(numbers)
        async with asyncio.TaskGroup() as group:
            async for portion in reader.read(wanted, form, group):
                for (sequence,) in portion.micro_batches:
                    assert isinstance(sequence, TrainSequence)
                    assert sequence.routes.unknown_ranges == ()
                    rows = sequence.routes.rows[:: TOKENS // 7]
                    assert np.array_equal(rows, self._expected[next(left) % DISTINCT])
                    del sequence, rows
                portion.micro_batches.clear()  # as the trainer does
        assert next(left, None) is None
        await client.close()

    def _channel_opener(self, port: str) -> Callable[[str], grpc.aio.Channel]:
        material = TlsMaterial.load(self._tls)
        assert material is not None
        tls_address = f"127.0.0.1:{self._ports['tls']}"
        # A connection each: grpc gives channels to one address one connection otherwise.
        options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))

        def opened(address: str) -> grpc.aio.Channel:
            if address != tls_address:
                return open_channel(address, Access())
            return AioChannel(grpc.aio.secure_channel(address, material.channel_credentials(), options=options), None)

        return opened

    async def _take(self) -> tuple[Usage, Usage]:
        """What worker and consumer used since the last call."""
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._worker.stdin.write(b"\n")
        line = await self._worker.stdout.readline()
        return Usage(**json.loads(line)), self._probe.take()


def failures(figures: list[Figures], full: bool) -> list[str]:
    """The bounds that are broken."""
    frames = figures[0]
    broken = []
    if full and frames.gigabytes_per_s < 1.0:
        broken.append(f"{frames.gigabytes_per_s:.2f} GB/s, at least 1 is required")
    if frames.cpu_s_per_gigabyte > CPU_LIMIT_S_PER_GB:
        broken.append(f"{frames.cpu_s_per_gigabyte:.1f} CPU s/GB, at most {CPU_LIMIT_S_PER_GB:g} are allowed")
    for end, usage in (("worker", frames.sender), ("consumer", frames.receiver)):
        lag_s = usage.lag_p99_s if full else usage.busy_p99_s
        if lag_s >= 0.1:
            broken.append(f"the {end}'s event loop lags by {lag_s * 1000:.0f} ms, less than 100 are required")
        if usage.growth_bytes > GROWTH_LIMIT_BYTES:
            broken.append(f"the {end} grew by {usage.growth_bytes >> 20} MiB, {GROWTH_LIMIT_BYTES >> 20} are allowed")
    return broken


def table(figures: list[Figures]) -> str:
    lines: list[tuple[str, ...]] = [
        ("", "GB/s", "CPU s/GB: worker", "consumer", "lag p99/max ms: worker", "consumer", "MiB: worker", "consumer")
    ]
    for each in figures:
        lag = [f"{u.lag_p99_s * 1000:.0f}/{u.lag_max_s * 1000:.0f}" for u in (each.sender, each.receiver)]
        lines.append(
            (
                each.name,
                f"{each.gigabytes_per_s:.2f}",
                f"{each.sender.cpu_s / each.gigabytes:.2f}",
                f"{each.receiver.cpu_s / each.gigabytes:.2f}",
                *lag,
                f"{each.sender.growth_bytes >> 20}",
                f"{each.receiver.growth_bytes >> 20}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


async def run(rollouts: int, full: bool) -> int:
    with tempfile.TemporaryDirectory(prefix="slip-") as directory:
        tls = make_certificates(Path(directory) / "certs", [], 1).tls
        (Path(directory) / "tls.json").write_text(tls.model_dump_json())
        command = (sys.executable, __file__, "--serve", directory, "--rollouts", str(rollouts))
        pipe = asyncio.subprocess.PIPE
        worker = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert worker.stdout is not None
        assert worker.stdin is not None
        try:
            ports = json.loads(await asyncio.wait_for(worker.stdout.readline(), TIMEOUT_S))
            compiled_check()  # a compiler stays in memory from the first plan on, whatever its size
            async with Probe() as probe:
                consumer = Consumer(worker, ports, tls, probe)
                beside = max(4, rollouts // 8)
                await consumer.measure("first connections and memory", "frames", beside)
                figures = [
                    await consumer.measure("frames", "frames", rollouts),
                    await consumer.measure("protobuf", "protobuf", beside),
                    await consumer.measure("frames, mTLS, 1 stream", "tls", beside),
                    await consumer.measure("frames, mTLS, 4 streams", "tls", beside, streams=4),
                ]
        finally:
            worker.stdin.close()
            await asyncio.wait_for(worker.wait(), 30)
    print(table(figures))
    broken = failures(figures, full)
    for sentence in broken:
        print(f"routed_experts: {sentence}")
    return 1 if broken else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="256 rollouts, absolute bounds")
    parser.add_argument("--rollouts", type=int, help="how many, other than 16 or 256")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    keep_freed_memory()  # as workers and trainer do
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    rollouts = arguments.rollouts or (256 if arguments.full else 16)
    if arguments.serve:
        asyncio.run(serve(rollouts, arguments.serve))
        return 0
    return asyncio.run(run(rollouts, arguments.full))


if __name__ == "__main__":
    sys.exit(main())
