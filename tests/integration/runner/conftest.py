"""A whole runner in this process, its environment worker a child, with stand-ins for the services it talks to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from slipstream.api.inference.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from slipstream.api.rollout.v1 import rows_pb2, rows_pb2_grpc, runner_pb2, runner_pb2_grpc
from slipstream.api.routing.v1 import routing_pb2, routing_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.config import ListenConfig, dump_toml
from slipstream.common.errors import Draining, RequestIdReused, RunnerSuperseded, SlipstreamError
from slipstream.common.runtime import build_server
from slipstream.environments.config import ImportedConfig
from slipstream.environments.tokenizer import TOKENIZER_FILE, TextCodec, build_tokenizer
from slipstream.runner.__main__ import run
from slipstream.runner.config import RunnerConfig
from tests.ports import free_port

VERSION = types_pb2.PolicyVersion(incarnation=1, step=3)
CODEC = TextCodec(build_tokenizer())
SERVICES = Path(__file__).parents[3] / "services"

Event = tuple[str, str, str]
"""What happened, at whom, to what: in the order in which it was answered."""


class FakeOrchestrator(runner_pb2_grpc.RunnerServiceServicer):
    """Hands out what the test gives it and keeps what is reported."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.waiting: list[runner_pb2.GroupAssignment] = []
        self.reports: dict[str, runner_pb2.GroupReport] = {}
        self.cancelled: dict[str, str] = {}
        self.refused: set[str] = set()
        self.unneeded: set[str] = set()
        self.superseded = False
        self.epoch = "first"
        self.takes_reports = True
        self.answers_acquires = True
        self.stops = False
        self.asked: list[runner_pb2.AcquireGroupsRequest] = []
        self.report_counts: Counter[str] = Counter()
        self.heartbeats: list[runner_pb2.HeartbeatRequest] = []
        self.spool_bytes = 0
        self.news = asyncio.Condition()
        self._answers: dict[str, runner_pb2.AcquireGroupsResponse] = {}

    async def AcquireGroups(self, request: runner_pb2.AcquireGroupsRequest, context: Any) -> Any:
        if any(asked.request_id == request.request_id and asked != request for asked in self.asked):
            raise RequestIdReused("this request_id came with another body before", request_id=request.request_id)
        self.asked.append(request)
        if not self.answers_acquires:
            raise Draining("its answer never comes")
        await self._await(lambda: bool(self.waiting) or self.superseded, 0.5)
        if self.superseded:
            raise RunnerSuperseded("a later process runs", epoch="2")
        if request.request_id not in self._answers:
            given, self.waiting = self.waiting[: request.max_groups], self.waiting[request.max_groups :]
            self._answers[request.request_id] = runner_pb2.AcquireGroupsResponse(groups=given, lease_ttl_ms=5000)
        return self._answers[request.request_id]

    async def Heartbeat(self, request: runner_pb2.HeartbeatRequest, context: Any) -> runner_pb2.HeartbeatResponse:
        if self.stops:
            raise Draining("this process is stopping")
        self.heartbeats.append(request)
        self.spool_bytes = request.spool_bytes
        for attempt in request.acknowledged:
            if self.cancelled.pop(attempt.group_id, None):
                self.events.append(("acknowledged", "orchestrator", attempt.group_id))
        await self.tell()
        await self._await(lambda: bool(self.cancelled), min(request.wait_ms / 1000, 0.3))
        return runner_pb2.HeartbeatResponse(
            cancellations=[
                runner_pb2.GroupCancellation(group=runner_pb2.GroupAttempt(group_id=group_id, attempt=1), reason=reason)
                for group_id, reason in self.cancelled.items()
            ],
            lease_ttl_ms=5000,
            orchestrator_epoch=self.epoch,
        )

    async def ReportGroups(self, request: runner_pb2.ReportGroupsRequest, context: Any) -> Any:
        attempts = [report.group for report in request.reports]
        self.report_counts.update(attempt.group_id for attempt in attempts)
        if not self.takes_reports:
            raise Draining("its answer never comes")
        self.reports |= {report.group.group_id: report for report in request.reports}
        await self.tell()
        return runner_pb2.ReportGroupsResponse(
            refused=[attempt for attempt in attempts if attempt.group_id in self.refused],
            unneeded=[attempt for attempt in attempts if attempt.group_id in self.unneeded],
        )

    async def tell(self) -> None:
        async with self.news:
            self.news.notify_all()

    async def _await(self, condition: Callable[[], bool], wait_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s), self.news:
                await self.news.wait_for(condition)


class FakeRouter(routing_pb2_grpc.RouterServiceServicer):
    """Offers the first worker of each pool that is not to be avoided."""

    def __init__(self) -> None:
        self.pools: dict[str, list[routing_pb2.WorkerRef]] = {"prefill": [], "decode": []}
        self.asked: list[routing_pb2.PlaceRequest] = []
        self.released: list[str] = []
        self.began: list[tuple[str, str]] = []
        """Runners that told of their start, and their epochs."""

    async def Place(self, request: routing_pb2.PlaceRequest, context: Any) -> routing_pb2.PlaceResponse:
        self.asked.append(request)
        chosen = {
            name: next((ref for ref in refs if ref.replica not in request.avoid_replicas), refs[0])
            for name, refs in self.pools.items()
            if refs
        }
        return routing_pb2.PlaceResponse(
            placement_id=f"place/{request.request_id}",
            lease_ttl_ms=60_000,
            prefill=chosen.get("prefill"),
            decode=chosen["decode"],
        )

    async def Release(self, request: routing_pb2.ReleaseRequest, context: Any) -> routing_pb2.ReleaseResponse:
        self.released += request.placement_ids
        if request.runner_id:
            self.began.append((request.runner_id, request.runner_epoch))
        return routing_pb2.ReleaseResponse(released_count=len(request.placement_ids))


class FakeWorker(
    prefill_pb2_grpc.PrefillServiceServicer,
    decode_pb2_grpc.DecodeServiceServicer,
    rows_pb2_grpc.RowsServiceServicer,
):
    """A worker of either pool. It counts correctly, unless `failure` is set, and waits for `gate`."""

    def __init__(self, replica: str, events: list[Event]) -> None:
        self.replica, self.events = replica, events
        self.address = ""
        self.failure: SlipstreamError | None = None
        self.breaks_after_first_chunk = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.says: Callable[[str], str] = lambda prompt: prompt.split()[-1]
        """What it answers to a prompt, before the end token."""
        self.tokens_a_message = 0
        """Of a streamed answer; 0 sends it whole. Each but the first waits for `gate`."""
        self.gate_from = 0
        """The first so many requests pass it."""
        self.gate_words = ""
        """Requests whose prompts do not have these pass it."""
        self.early: list[int] = []
        """Samples of a request that pass it, in this order."""
        self.abort_s = 0.0
        self.abort_count = 0
        """Of aborts that it was asked for."""
        self.prefills: list[prefill_pb2.PrefillRequest] = []
        self.decodes: list[decode_pb2.DecodeRequest] = []
        self.released_rows: list[str] = []

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> prefill_pb2.PrefillResponse:
        self.prefills.append(request)
        if self.failure is not None:
            raise self.failure
        kv = prefill_pb2.KvHandle(address=self.address, replica=self.replica, transfer_id=request.request_id)
        response = prefill_pb2.PrefillResponse(kv=kv, version=VERSION, cached_token_count=4)
        if request.first_route_position < len(request.prompt.new_token_ids) - 1:
            response.routes.CopyFrom(self._routes(f"p/{request.request_id}"))
        return response

    async def Decode(self, request: decode_pb2.DecodeRequest, context: Any) -> AsyncIterator[Any]:
        self.decodes.append(request)
        if self.failure is not None:
            raise self.failure
        if self.breaks_after_first_chunk:
            yield decode_pb2.DecodeResponse(chunks=[self._chunk(request, 0)])
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        if self.tokens_a_message:
            async for part in self._parts(request):
                yield part
            return
        for index in self.early:
            yield decode_pb2.DecodeResponse(chunks=[self._chunk(request, index)])
        gated = self.gate_words in CODEC.decode_all(list(request.prompt.new_token_ids))
        if gated and len(self.decodes) > self.gate_from:
            await self.gate.wait()
        response = decode_pb2.DecodeResponse(chunks=[self._chunk(request, i) for i in range(len(request.sample_ids))])
        if not request.HasField("kv"):
            response.prompt_routes.CopyFrom(self._routes(f"d/{request.request_id}"))
            response.chunks[0].cached_token_count = 2
        yield response

    async def Abort(self, request: Any, context: Any) -> Any:
        self.abort_count += 1
        await asyncio.sleep(self.abort_s)
        self.events.append(("aborted", self.replica, request.request_id))
        if isinstance(request, prefill_pb2.PrefillServiceAbortRequest):
            return prefill_pb2.PrefillServiceAbortResponse(found=True)
        return decode_pb2.DecodeServiceAbortResponse(found=True)

    async def ReleaseRows(self, request: rows_pb2.ReleaseRowsRequest, context: Any) -> rows_pb2.ReleaseRowsResponse:
        self.released_rows += request.keys
        return rows_pb2.ReleaseRowsResponse(released_count=len(request.keys))

    async def _parts(self, request: decode_pb2.DecodeRequest) -> AsyncIterator[Any]:
        whole = self._chunk(request, 0)
        for start in range(0, len(whole.token_ids), self.tokens_a_message):
            end = start + self.tokens_a_message
            part = decode_pb2.SampleChunk(token_ids=whole.token_ids[start:end], logprobs=whole.logprobs[start:end])
            part.spans.add(token_count=len(part.token_ids), version=request.min_policy_version)
            if end >= len(whole.token_ids):
                part.finish_reason = whole.finish_reason
            if start:
                await self.gate.wait()
            yield decode_pb2.DecodeResponse(chunks=[part])

    def _chunk(self, request: decode_pb2.DecodeRequest, index: int) -> decode_pb2.SampleChunk:
        prompt = CODEC.decode_all(list(request.prompt.new_token_ids))
        token_ids = [*CODEC.encode(self.says(prompt)), CODEC.end_id]
        return decode_pb2.SampleChunk(
            sample_index=index,
            token_ids=token_ids,
            logprobs=[-0.5 * (position + 1) for position in range(len(token_ids))],
            spans=[types_pb2.VersionSpan(token_count=len(token_ids), version=request.min_policy_version)],
            finish_reason=types_pb2.FINISH_REASON_STOP,
            routes=self._routes(f"d/{request.sample_ids[index]}"),
        )

    def _routes(self, key: str) -> types_pb2.RowsRef:
        return types_pb2.RowsRef(holder=self.address, key=key, dtype="uint8", row_shape=[3, 2])


class World:
    """The runner's process and its neighbours."""

    def __init__(self, make_config: Callable[..., Any], stack: AsyncExitStack) -> None:
        self.events: list[Event] = []
        self.orchestrator = FakeOrchestrator(self.events)
        self.router = FakeRouter()
        names = [f"{pool}-{number}" for pool in ("prefill", "decode") for number in (1, 2)]
        self.workers = {name: FakeWorker(name, self.events) for name in names}
        self.process: asyncio.Task[None]
        self.rows: Any = None
        self.directory: Path
        """Of the run."""
        self._start_process: Callable[[], asyncio.Task[None]]
        self._config: RunnerConfig
        self._file: Path
        self._make_config = make_config
        self._stack = stack
        self._orchestrator_server: grpc.aio.Server
        self._orchestrator_port = free_port()
        self._numbers = itertools.count(1)

    async def start(self, tmp_path: Path, **fields: Any) -> None:
        await self.start_orchestrator()
        router_port = await self._serve([(routing_pb2_grpc.add_RouterServiceServicer_to_server, self.router, "")])
        for name, worker in self.workers.items():
            pool = name.partition("-")[0]
            add = {
                "prefill": prefill_pb2_grpc.add_PrefillServiceServicer_to_server,
                "decode": decode_pb2_grpc.add_DecodeServiceServicer_to_server,
            }[pool]
            rows = (rows_pb2_grpc.add_RowsServiceServicer_to_server, worker, "")
            worker.address = f"127.0.0.1:{await self._serve([(add, worker, ''), rows])}"
            self.router.pools[pool].append(routing_pb2.WorkerRef(replica=name, address=worker.address, epoch="e"))
        (tmp_path / "model").mkdir()
        build_tokenizer().save(str(tmp_path / "model" / TOKENIZER_FILE))
        (tmp_path / "model" / "config.json").write_text("{}")
        config = self._config = self._make_config(
            RunnerConfig,
            replica="runner-1",
            listen=ListenConfig(port=free_port()),
            orchestrator_address=f"127.0.0.1:{self._orchestrator_port}",
            router_address=f"127.0.0.1:{router_port}",
            model_dir=tmp_path / "model",
            **fields,
        )
        file = self._file = tmp_path / "runner.toml"
        file.write_text(dump_toml(config))
        self.directory = config.run_dir
        self.address = f"127.0.0.1:{config.listen.port}"
        channel = await self._stack.enter_async_context(open_channel(self.address, Access()))
        self.rows = rows_pb2_grpc.RowsServiceStub(channel)
        self._start_process = lambda: asyncio.create_task(run(self._config, ["@", str(file)]))
        self.process = self._start_process()
        self._stack.push_async_callback(self._end_process)

    async def restart(self, **fields: Any) -> None:
        """End the runner's process as a kill would, for all that others see, and start the next one.

        `fields`: what its config has otherwise from now on.
        """
        await self._end_process()
        self._config = self._config.model_copy(update=fields)
        self._file.write_text(dump_toml(self._config))
        self.process = self._start_process()

    async def run_another(self) -> None:
        """Run a second process of the same name, at a port of its own."""
        async with asyncio.timeout(60):
            await run(
                self._config.model_copy(update={"listen": ListenConfig(port=free_port())}), ["@", str(self._file)]
            )

    async def until_up(self) -> None:
        """Wait until the runner's process takes calls."""
        host, _, port = self.address.partition(":")
        async with asyncio.timeout(60):
            while True:
                assert not self.process.done(), "the runner ended"
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection(host, int(port))
                    writer.close()
                    return
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """End the runner and its environment workers."""
        await self._end_process()

    async def start_orchestrator(self) -> None:
        config = self._make_config(listen=ListenConfig(port=self._orchestrator_port))
        add = runner_pb2_grpc.add_RunnerServiceServicer_to_server
        self._orchestrator_server, _ = build_server(config, [(add, self.orchestrator, "")])
        await self._orchestrator_server.start()
        self._stack.push_async_callback(self._orchestrator_server.stop, None)

    async def stop_orchestrator(self) -> None:
        await self._orchestrator_server.stop(None)

    async def give(
        self,
        environment: str = "good",
        task_index: int = 7,
        samples: int = 2,
        group_id: str = "",
        version: types_pb2.PolicyVersion = VERSION,
        needed: int = 0,
    ) -> str:
        """Hand a group to the runner; returns its id."""
        group_id = group_id or f"g{next(self._numbers)}"
        self.orchestrator.waiting.append(
            runner_pb2.GroupAssignment(
                group_id=group_id,
                attempt=1,
                purpose=runner_pb2.GROUP_PURPOSE_TRAINING,
                environment=environment,
                split="train",
                task_index=task_index,
                sample_count=samples,
                needed_count=needed,
                sampling=types_pb2.Sampling(temperature=1.0, max_new_tokens=10),
                dispatch_version=version,
                salt="run/1.3/float32",
                deadline_ms=60_000,
            )
        )
        await self.orchestrator.tell()
        return group_id

    async def report(self, group_id: str) -> runner_pb2.GroupReport:
        """The report of a group, once it is there."""
        await self.until(lambda: group_id in self.orchestrator.reports)
        return self.orchestrator.reports[group_id]

    async def until(self, condition: Callable[[], bool], timeout_s: float = 100.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                assert not self.process.done(), "the runner ended"
                await asyncio.sleep(0.01)

    async def fetch(self, *keys: str, offset: int = 0) -> tuple[rows_pb2.RowsHeader, bytes]:
        refs = [types_pb2.RowsRef(holder=self.address, key=key, dtype="int32") for key in keys]
        messages = [m async for m in self.rows.FetchRows(rows_pb2.FetchRowsRequest(refs=refs, offset_bytes=offset))]
        return messages[0].header, b"".join(message.data for message in messages[1:])

    def ask_to_stop(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    async def _end_process(self) -> None:
        self.process.cancel()
        await asyncio.wait([self.process])
        if not self.process.cancelled():
            self.process.exception()  # looked at: the test has its own view of it

    async def _serve(self, servicers: list[tuple[Any, Any, str]]) -> int:
        server, port = build_server(self._make_config(), servicers)
        await server.start()
        self._stack.push_async_callback(server.stop, None)
        return port


def environment(behaviour: str = "") -> ImportedConfig:
    name = behaviour.replace(" ", "_") or "good"
    options = {"behaviour": behaviour} if behaviour else {}
    return ImportedConfig(name=name, path="small_environment:Counting", options=options)


@pytest.fixture
async def start_world(
    tmp_path: Path, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Any]]:
    """Starts a world whose runner has the environment "good" and those that misbehave as named."""
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SERVICES), here, os.environ.get("PYTHONPATH", "")]))

    @asynccontextmanager
    async def opened(*behaviours: str, **fields: Any) -> AsyncIterator[World]:
        fields.setdefault("environments", [environment(behaviour) for behaviour in ("", *behaviours)])
        async with AsyncExitStack() as stack:
            world = World(make_config, stack)
            await world.start(tmp_path, **fields)
            yield world

    async with AsyncExitStack() as stack:

        async def start(*behaviours: str, **fields: Any) -> World:
            return await stack.enter_async_context(opened(*behaviours, **fields))

        yield start


@pytest.fixture
async def world(start_world: Callable[..., Any]) -> World:
    return await start_world()
