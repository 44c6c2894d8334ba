"""The training loop over real gRPC, with a scripted orchestrator, row holders and broadcaster."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from slipstream.api.broadcast.v1 import broadcast_pb2, broadcast_pb2_grpc
from slipstream.api.rollout.v1 import rows_pb2, rows_pb2_grpc
from slipstream.api.training.v1 import batch_pb2, batch_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.config import ServiceConfig
from slipstream.common.frames import encode_header, iter_data, iter_frames, raw_requests, read_header
from slipstream.common.runtime import build_server
from slipstream.common.version import PolicyVersion
from slipstream.models.lora.adapters import attach
from slipstream.models.lora.config import LoraConfig
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import build_model, init_weights
from slipstream.trainer.checkpointer import Checkpointer
from slipstream.trainer.config import TrainerConfig
from slipstream.trainer.fetch import RowsClient
from slipstream.trainer.loop import TrainingLoop
from slipstream.trainer.optim_config import OptimConfig
from slipstream.trainer.portions import PlanReader
from slipstream.trainer.servicer import TrainerServicer
from slipstream.trainer.status import Status
from slipstream.trainer.step import Learner
from slipstream.trainer.torch_thread import TorchThread
from slipstream.weights.adapter import Adapter
from slipstream.weights.manifest import describe_tensors
from slipstream.weights.transport import GrpcWeightTransport

SIZES = MoeConfig(
    vocab_size=24, dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, expert_dim=16, max_context_tokens=32
)
STEPS, SEQUENCES, PROMPT, LENGTH = 3, 4, 5, 9


class RowHolder(rows_pb2_grpc.RowsServiceServicer):
    """Holds rows by key; the first stream breaks off in the middle if told so."""

    def __init__(self, break_once: bool = False) -> None:
        self.rows: dict[str, tuple[int, bytes]] = {}
        self.streams: list[int] = []
        self.wrong_once: dict[str, bytes] = {}
        self._break = break_once

    async def FetchRows(
        self, request: rows_pb2.FetchRowsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        self.streams.append(request.offset_bytes)
        held = [self.rows.get(ref.key) for ref in request.refs]
        if request.offset_bytes or not self._break:  # an answer that will be whole
            wrong = [self.wrong_once.pop(ref.key, None) for ref in request.refs]
            held = [rows if data is None else (0, data) for rows, data in zip(held, wrong, strict=True)]
        data = b"".join(rows for _, rows in filter(None, held))
        parts = [
            rows_pb2.RowsPart(missing=True)
            if part is None
            else rows_pb2.RowsPart(size_bytes=len(part[1]), first_position=part[0])
            for part in held
        ]
        yield encode_header(rows_pb2.RowsHeader(parts=parts, size_bytes=len(data), crc32=zlib.crc32(data)))
        if self._break:
            self._break = False
            for frame in iter_frames([data[: len(data) // 2]]):
                yield frame
            return
        for frame in iter_frames([data], request.offset_bytes):
            yield frame


class Broadcaster(broadcast_pb2_grpc.BroadcastServiceServicer):
    """Seals whatever comes and keeps it."""

    def __init__(self) -> None:
        self.bytes: dict[PolicyVersion, bytearray] = {}
        self.sealed: list[PolicyVersion] = []
        self.probes: list[broadcast_pb2.Probe] = []
        self.adapters: list[Adapter] = []

    async def OpenVersion(self, request, context):
        self.bytes[PolicyVersion.from_proto(request.version)] = bytearray()
        return broadcast_pb2.OpenVersionResponse()

    @raw_requests
    async def PublishShard(self, request_iterator, context):
        header = await read_header(request_iterator, broadcast_pb2.ShardHeader)
        data = self.bytes[PolicyVersion.from_proto(header.version)]
        async for frame in iter_data(request_iterator):
            data += frame
        return broadcast_pb2.PublishShardResponse(size_bytes=len(data))

    async def SealVersion(self, request, context):
        self.sealed.append(PolicyVersion.from_proto(request.version))
        self.probes.append(request.probe)
        if request.HasField("adapter"):
            self.adapters.append(Adapter.from_proto(request.adapter))
        manifest = broadcast_pb2.Manifest(version=request.version, probe=request.probe)
        return broadcast_pb2.SealVersionResponse(manifest=manifest)


class Orchestrator(batch_pb2_grpc.BatchServiceServicer):
    """Hands out scripted plans: pending once, then the plan, and at the end "ended"."""

    def __init__(self, broadcaster: Broadcaster) -> None:
        self._broadcaster = broadcaster
        self.plans: list[batch_pb2.Plan] = []
        self.asked: Counter[int] = Counter()
        self.reports: list[batch_pb2.ReportStepRequest] = []
        self.waiting = asyncio.Event()
        self.checkpoint_steps: list[int | None] = []
        self.checkpoint_due = False
        self.checkpoint_asked: set[int] = set()
        """Steps before which somebody asks for one."""

    async def GetPlan(self, request, context):
        self.asked[request.step] += 1
        if request.step > len(self.plans):
            return batch_pb2.GetPlanResponse(ended=batch_pb2.PlanEnded(reason="all steps are trained"))
        self.checkpoint_steps.append(request.checkpoint_step if request.HasField("checkpoint_step") else None)
        if self.asked[request.step] == 1:
            return batch_pb2.GetPlanResponse(pending=batch_pb2.PlanPending(checkpoint_due=self.checkpoint_due))
        answer = batch_pb2.GetPlanResponse(
            plan=self.plans[request.step - 1], checkpoint_asked=request.step in self.checkpoint_asked
        )
        answer.plan.version.incarnation = request.incarnation
        return answer

    async def ReportStep(self, request, context):
        assert PolicyVersion.from_proto(request.version) in self._broadcaster.sealed
        self.reports.append(request)
        return batch_pb2.ReportStepResponse()

    async def ReportActivity(self, request, context):
        return batch_pb2.ReportActivityResponse()

    async def wait(self, request, context):
        """GetPlan of a run in which nothing gets ready."""
        self.waiting.set()
        await asyncio.sleep(0.05)
        return batch_pb2.GetPlanResponse(pending=batch_pb2.PlanPending())


class World:
    """The trainer's peers, each on a port of its own."""

    def __init__(self) -> None:
        self.broadcaster = Broadcaster()
        self.orchestrator = Orchestrator(self.broadcaster)
        self.runner = RowHolder(break_once=True)
        self.workers = [RowHolder(), RowHolder()]
        self.addresses: dict[object, str] = {}
        self.channels: list[grpc.aio.Channel] = []

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        parts = [
            (
                batch_pb2_grpc.add_BatchServiceServicer_to_server,
                self.orchestrator,
                "slipstream.api.training.v1.BatchService",
            ),
            (
                broadcast_pb2_grpc.add_BroadcastServiceServicer_to_server,
                self.broadcaster,
                "slipstream.api.broadcast.v1.BroadcastService",
            ),
            *(
                (rows_pb2_grpc.add_RowsServiceServicer_to_server, holder, "slipstream.api.rollout.v1.RowsService")
                for holder in (self.runner, *self.workers)
            ),
        ]
        servers = []
        for part in parts:
            server, port = build_server(ServiceConfig(), [part])
            await server.start()
            servers.append(server)
            self.addresses[part[1]] = f"127.0.0.1:{port}"
        try:
            yield
        finally:
            for channel in self.channels:
                await channel.close()
            for server in servers:
                await server.stop(grace=None)

    def channel(self, address: str) -> grpc.aio.Channel:
        self.channels.append(open_channel(address, Access()))
        return self.channels[-1]

    def ref(self, holder: RowHolder, key: str, first: int, rows: np.ndarray) -> types_pb2.RowsRef:
        """Put rows at a holder and refer to them."""
        holder.rows[key] = (first, rows.tobytes())
        return types_pb2.RowsRef(
            holder=self.addresses[holder],
            key=key,
            dtype=str(rows.dtype),
            row_shape=rows.shape[1:],
            ranges=[types_pb2.RowRange(start=first, end=first + len(rows))],
            size_bytes=rows.nbytes,
        )

    def plan(self, step: int) -> batch_pb2.Plan:
        """Four random rollouts sampled by the weights before `step`, routes split over prefill and decode worker."""
        rng = np.random.default_rng(step)
        version = types_pb2.PolicyVersion(incarnation=1, step=step - 1)
        sequences = []
        for index in range(SEQUENCES):
            name = f"{step}.{index}"
            routes = rng.random((LENGTH - 1, 2, 4)).argsort(-1)[..., :2].astype(np.uint8)
            sequences.append(
                batch_pb2.PlannedSequence(
                    rollout_id=name,
                    token_count=LENGTH,
                    advantage=(-1.0) ** index,
                    loss_ranges=[types_pb2.RowRange(start=PROMPT, end=LENGTH)],
                    spans=[
                        types_pb2.VersionSpan(token_count=LENGTH - PROMPT, version=version, kv_oldest_version=version)
                    ],
                    token_ids=self.ref(self.runner, f"t/{name}", 0, rng.integers(0, 24, LENGTH).astype(np.int32)),
                    logprobs=self.ref(self.runner, f"l/{name}", 0, np.full(LENGTH, -3.0, np.float32)),
                    routes=[
                        self.ref(self.workers[0], f"p/{name}", 0, routes[: PROMPT - 1]),
                        self.ref(self.workers[1], f"d/{name}", PROMPT - 1, routes[PROMPT - 1 :]),
                    ],
                )
            )
        batches = [batch_pb2.MicroBatch(sequences=sequences[:3]), batch_pb2.MicroBatch(sequences=sequences[3:])]
        return batch_pb2.Plan(
            version=types_pb2.PolicyVersion(incarnation=1, step=step),
            micro_batches=batches,
            loss_token_count=SEQUENCES * (LENGTH - PROMPT),
            token_count=SEQUENCES * LENGTH,
            last=step == STEPS,
        )


def start(config: TrainerConfig, status: Status, resumed: bool = False) -> tuple[Learner, dict[str, float]]:
    model = build_model(SIZES)
    init_weights(model, config.seed)
    if config.lora is not None:
        attach(model, config.lora, config.seed)
    return Learner(model, config.optim, config.loss), {"sft_accuracy": 0.4}


@pytest.fixture
def torch_thread() -> Iterator[TorchThread]:
    thread = TorchThread(1)
    yield thread
    thread.close()


def training_loop(
    world: World, config: TrainerConfig, thread: TorchThread, status: Status, checkpoints: Checkpointer | None = None
) -> TrainingLoop:
    checkpoints = checkpoints or Checkpointer(config, thread, status)
    rows = RowsClient(world.channel, config.rows_timeout_s)
    return TrainingLoop(
        config,
        batches=batch_pb2_grpc.BatchServiceStub(world.channel(world.addresses[world.orchestrator])),
        transport=GrpcWeightTransport(world.channel(world.addresses[world.broadcaster])),
        rows=PlanReader(rows, thread, config.rows_window_bytes),
        status=status,
        torch=thread,
        start=start,
        checkpoints=checkpoints,
    )


async def test_each_plan_becomes_a_sealed_version(tmp_path, torch_thread):
    world, status = World(), Status()
    config = TrainerConfig(run_dir=tmp_path, replica="trainer", optim=OptimConfig(total_steps=STEPS), rows_timeout_s=30)
    async with world.serve():
        world.orchestrator.plans = [world.plan(step) for step in range(1, STEPS + 1)]
        await training_loop(world, config, torch_thread, status).train()

    versions = [PolicyVersion(1, step) for step in range(STEPS + 1)]
    assert world.broadcaster.sealed == versions
    assert [PolicyVersion.from_proto(report.version) for report in world.orchestrator.reports] == versions
    assert world.orchestrator.reports[0].metrics["sft_accuracy"] == pytest.approx(0.4)
    assert len({bytes(data) for data in world.broadcaster.bytes.values()}) == STEPS + 1
    assert all(len(probe.logprobs) == config.probe_tokens - 1 for probe in world.broadcaster.probes)
    metrics = world.orchestrator.reports[-1].metrics
    assert metrics["routes_unknown_fraction"] == metrics["sequences_lost"] == 0.0
    assert metrics["loss_tokens"] == SEQUENCES * (LENGTH - PROMPT)
    assert metrics["mismatch_kl"] > 0.0
    # The stream that broke went on from where it was.
    assert world.runner.streams[0] == 0
    assert world.runner.streams[1] > 0
    assert status.version == versions[-1]
    assert status.activity == "ended"
    lines = (tmp_path / "timeline" / "trainer.jsonl").read_text().splitlines()
    kinds = Counter(json.loads(line)["kind"] for line in lines)
    assert kinds == {"train_step": STEPS, "publish": STEPS + 1}
    assert (tmp_path / "checkpoints" / "final" / "model.safetensors").exists()


async def test_adapters_are_published_alone_once_the_weights_are(tmp_path, torch_thread):
    world = World()
    lora = LoraConfig(rank=2)
    config = TrainerConfig(run_dir=tmp_path, optim=OptimConfig(total_steps=STEPS), rows_timeout_s=30, lora=lora)
    async with world.serve():
        world.orchestrator.plans = [world.plan(step) for step in range(1, STEPS + 1)]
        await training_loop(world, config, torch_thread, Status()).train()
    versions = [PolicyVersion(1, step) for step in range(STEPS + 1)]
    assert world.broadcaster.adapters == [
        Adapter(f"{tmp_path.name}-1-{version.step}", versions[0], 2, lora.alpha) for version in versions
    ]
    sizes = [len(world.broadcaster.bytes[version]) for version in versions]
    learner, _ = start(config, Status())
    adapter = sum(array.nbytes for array in learner.export_adapter(with_base=False).values())
    weights = sum(array.nbytes for array in learner.export().values())
    assert sizes == [weights + adapter] + [adapter] * STEPS
    assert [report.metrics["published_bytes"] for report in world.orchestrator.reports] == sizes
    names = {path.name for path in (tmp_path / "checkpoints" / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    assert (tmp_path / "checkpoints" / "final" / "model.safetensors").exists()


async def test_missing_routes_are_routed_live_and_lost_tokens_cost_their_sequence_alone(tmp_path, torch_thread):
    world = World()
    config = TrainerConfig(run_dir=tmp_path, rows_timeout_s=30)
    async with world.serve():
        world.orchestrator.plans = [world.plan(1)]
        del world.workers[1].rows["d/1.0"]
        del world.runner.rows["t/1.3"]
        with capture_logs() as lines:
            await training_loop(world, config, torch_thread, Status()).train()
    metrics = world.orchestrator.reports[-1].metrics
    assert metrics["sequences_lost"] == 1.0
    assert metrics["routes_unknown_fraction"] == pytest.approx((LENGTH - PROMPT) / (3 * (LENGTH - 1)))
    warned = [line["step"] for line in lines if (line["event"], line["log_level"]) == ("routes_unknown", "warning")]
    assert warned == [1]  # above 1 %
    assert REGISTRY.get_sample_value("slipstream_trainer_routes_unknown_fraction") == metrics["routes_unknown_fraction"]


def wrong_dtype(world: World) -> None:
    """What the worker holds of 1.2 is of another type; the plan says so."""
    world.orchestrator.plans[0].micro_batches[0].sequences[2].routes[1].dtype = "uint16"


def wrong_experts(world: World) -> None:
    world.workers[1].rows["d/1.2"] = (PROMPT - 1, b"\x09" * 2 * 2 * (LENGTH - PROMPT))


def longer_tokens(world: World) -> None:
    """The runner has more of 1.2 than the plan refers to."""
    world.runner.rows["t/1.2"] = (0, b"\x01" * 4 * (LENGTH + 1))


def much_longer_routes(world: World) -> None:
    """More than all references to this worker together."""
    world.workers[1].rows["d/1.2"] = (PROMPT - 1, b"\x01" * 10_000)


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (wrong_dtype, "routes.dtype"),
        (wrong_experts, "routes"),
        (longer_tokens, "token_ids.size_bytes"),
        (much_longer_routes, "routes.size_bytes"),
    ],
)
async def test_rows_that_are_wrong_are_asked_for_again_and_cost_one_rollout(tmp_path, torch_thread, spoil, field):
    world = World()
    refused_before = REGISTRY.get_sample_value("slipstream_trainer_rollouts_refused_total", {"field": field}) or 0
    async with world.serve():
        world.orchestrator.plans = [world.plan(1)]
        spoil(world)
        with capture_logs() as lines:
            await training_loop(world, TrainerConfig(run_dir=tmp_path), torch_thread, Status()).train()
    metrics = world.orchestrator.reports[-1].metrics
    assert (metrics["sequences_lost"], metrics["sequences_refused"]) == (1.0, 1.0)
    assert metrics["loss_tokens"] == (SEQUENCES - 1) * (LENGTH - PROMPT)
    refused = [(line["rollout_id"], line["field"]) for line in lines if line["event"] == "rows_refused"]
    assert refused == [("1.2", field)] * 2
    assert [line["rollout_id"] for line in lines if line["event"] == "rollout_lost"] == ["1.2"]
    refused_after = REGISTRY.get_sample_value("slipstream_trainer_rollouts_refused_total", {"field": field})
    assert refused_after == refused_before + 1


async def test_rows_that_are_right_when_asked_for_again_cost_nothing(tmp_path, torch_thread):
    world = World()
    async with world.serve():
        world.orchestrator.plans = [world.plan(1)]
        world.runner.wrong_once = {"t/1.1": b"\xff" * 4 * LENGTH}
        await training_loop(world, TrainerConfig(run_dir=tmp_path), torch_thread, Status()).train()
    metrics = world.orchestrator.reports[-1].metrics
    assert (metrics["sequences_lost"], metrics["sequences"]) == (0.0, SEQUENCES)
    assert world.runner.wrong_once == {}


async def test_a_step_that_is_not_finite_publishes_the_same_weights_and_the_next_one_trains(tmp_path, torch_thread):
    world = World()
    skipped_before = REGISTRY.get_sample_value("slipstream_trainer_steps_skipped_total") or 0
    async with world.serve():
        world.orchestrator.plans = [world.plan(step) for step in (1, 2, 3)]
        world.orchestrator.plans[1].micro_batches[0].sequences[1].advantage = 1e300  # finite, until it is float32
        await training_loop(world, TrainerConfig(run_dir=tmp_path), torch_thread, Status()).train()
    assert [report.skipped for report in world.orchestrator.reports] == [False, False, True, False]
    published = [bytes(world.broadcaster.bytes[PolicyVersion(1, step)]) for step in range(4)]
    assert published[1] == published[2]
    assert len(set(published)) == 3
    assert REGISTRY.get_sample_value("slipstream_trainer_steps_skipped_total") == skipped_before + 1


async def test_the_weights_published_are_those_of_the_model(tmp_path, torch_thread):
    world = World()
    config = TrainerConfig(run_dir=tmp_path)
    async with world.serve():
        await training_loop(world, config, torch_thread, Status()).train()  # no plan: only the base model
    learner, _ = start(config, Status())
    _, buffers = describe_tensors(learner.export())
    assert bytes(world.broadcaster.bytes[PolicyVersion(1, 0)]) == b"".join(bytes(buffer) for buffer in buffers)
    probe = world.broadcaster.probes[0]
    with torch.no_grad():
        learner.model.routes.begin()
        hidden = learner.model.hidden(torch.tensor([list(probe.token_ids[:-1])]))
        logp = torch.log_softmax(learner.model.logits(hidden), -1)[0]
    expected = logp[torch.arange(len(probe.token_ids) - 1), torch.tensor(probe.token_ids[1:])]
    assert list(probe.logprobs) == pytest.approx(expected.tolist(), abs=1e-5)


async def test_stop_ends_the_loop_while_it_waits_for_a_plan(tmp_path, torch_thread):
    world, status = World(), Status()
    world.orchestrator.GetPlan = world.orchestrator.wait
    config = TrainerConfig(run_dir=tmp_path)
    checkpoints = Checkpointer(config, torch_thread, status)
    async with world.serve(), serve_trainer(world, status, checkpoints) as stub:
        loop = training_loop(world, config, torch_thread, status, checkpoints)
        async with asyncio.TaskGroup() as group:
            training = group.create_task(loop.train())
            await world.orchestrator.waiting.wait()
            await stub.Stop(trainer_pb2.StopRequest(request_id="stop"))
            await asyncio.wait_for(training, 30)
        answer = await stub.GetStatus(trainer_pb2.GetStatusRequest())
        assert (answer.activity, answer.version.incarnation, answer.version.step) == ("ended", 1, 0)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest(request_id="save"))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@asynccontextmanager
async def serve_trainer(
    world: World, status: Status, checkpoints: Checkpointer
) -> AsyncIterator[trainer_pb2_grpc.TrainerServiceStub]:
    add = trainer_pb2_grpc.add_TrainerServiceServicer_to_server
    service = (add, TrainerServicer(status, checkpoints), "slipstream.api.training.v1.TrainerService")
    server, port = build_server(ServiceConfig(), [service])
    await server.start()
    try:
        yield trainer_pb2_grpc.TrainerServiceStub(world.channel(f"127.0.0.1:{port}"))
    finally:
        await server.stop(grace=None)
