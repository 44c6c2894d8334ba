"""Several trainer processes over real gRPC: the same steps as one alone, and the end of all when one is lost."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file

from slipstream.algorithms.packing import pack
from slipstream.api.broadcast.v1 import broadcast_pb2_grpc
from slipstream.api.rollout.v1 import rows_pb2, rows_pb2_grpc
from slipstream.api.training.v1 import batch_pb2, batch_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.broadcaster.publications import Publications
from slipstream.broadcaster.servicer import BroadcastServicer
from slipstream.broadcaster.store import VersionStore
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.config import ListenConfig, ServiceConfig, dump_toml
from slipstream.common.rows import NOTHING, Held, answer_rows
from slipstream.common.runtime import build_server
from slipstream.common.state import State
from slipstream.common.version import PolicyVersion
from slipstream.launcher.ports import PortLease, port_of, take_ports
from slipstream.trainer.config import (
    CheckpointConfig,
    ModelConfig,
    ParallelConfig,
    RankConfig,
    SftConfig,
    TrainerConfig,
)
from slipstream.trainer.optim_config import OptimConfig
from tests import standstill

pytestmark = pytest.mark.timeout(400)
READY_WITHIN_S = 150.0
"""In which so many processes have imported torch and done their work, on a machine that is busy."""
ENDS_WITHIN_S = 60.0
STEPS, LAYERS, EXPERTS, TOP_K = 2, 2, 4, 2
MODEL = ModelConfig(
    dim=32, n_layers=LAYERS, n_heads=4, n_kv_heads=2, head_dim=8, n_experts=EXPERTS, top_k=TOP_K, expert_dim=16
)
LENGTHS = [(9, 5), (30, 12), (17, 9), (24, 20), (12, 6)]
"""Tokens of each rollout, and how many of them train."""
LOST, UNROUTED = 2, 3
"""Rollouts whose tokens, and whose routes, nobody has any more."""
SAME = (
    *("loss", "balance_loss", "grad_norm", "entropy", "loss_tokens", "mismatch_kl", "masked_fraction", "sequences"),
    *("sequences_lost", "routes_unknown_fraction", "expert_load_max"),
)


class Holder(rows_pb2_grpc.RowsServiceServicer):
    """Rows by key, as many of them as are asked for. Counts the bytes of routes that it gave."""

    def __init__(self) -> None:
        self.rows: dict[str, np.ndarray] = {}
        self.route_bytes = 0

    async def FetchRows(self, request: rows_pb2.FetchRowsRequest, context: Any) -> AsyncIterator[bytes]:
        async for message in answer_rows(request, self._held):
            yield message

    def _held(self, ref: types_pb2.RowsRef) -> Held:
        if ref.key not in self.rows:
            return NOTHING
        first, last = ref.ranges[0].start, ref.ranges[-1].end
        rows = np.ascontiguousarray(self.rows[ref.key][first:last])
        self.route_bytes += rows.nbytes if rows.ndim > 1 else 0
        return Held(rows_pb2.RowsPart(size_bytes=rows.nbytes, first_position=first), rows.data.cast("B"))


class Orchestrator(batch_pb2_grpc.BatchServiceServicer):
    """The same sequences for any number of data ranks."""

    def __init__(self) -> None:
        self.plans: dict[tuple[int, int], batch_pb2.Plan] = {}
        self.reports: list[batch_pb2.ReportStepRequest] = []
        self.reported = asyncio.Event()
        self.held_back = 0
        """The step whose plan nobody gets for now."""

    async def GetPlan(self, request: batch_pb2.GetPlanRequest, context: Any) -> batch_pb2.GetPlanResponse:
        if request.step == self.held_back:
            await asyncio.sleep(0.1)
            return batch_pb2.GetPlanResponse(pending=batch_pb2.PlanPending())
        plan = self.plans.get((request.step, request.rank))
        if plan is None:
            return batch_pb2.GetPlanResponse(ended=batch_pb2.PlanEnded(reason="all steps are trained"))
        answer = batch_pb2.GetPlanResponse(plan=plan)
        answer.plan.version.incarnation = request.incarnation
        return answer

    async def ReportStep(self, request: batch_pb2.ReportStepRequest, context: Any) -> batch_pb2.ReportStepResponse:
        self.reports.append(request)
        if request.version.step:
            self.reported.set()
        return batch_pb2.ReportStepResponse()

    async def ReportActivity(self, request: Any, context: Any) -> batch_pb2.ReportActivityResponse:
        return batch_pb2.ReportActivityResponse()


class World:
    """The trainer's peers."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.orchestrator, self.holder = Orchestrator(), Holder()
        self.store = VersionStore(directory / "versions", 100_000_000)
        self.addresses: dict[str, str] = {}
        self.checkpoint_interval_steps = 0
        self.address = "127.0.0.1:0"
        """Of the trainer's rank 0."""

    @asynccontextmanager
    async def serve(self, data_ranks: int) -> AsyncIterator[None]:
        publications = Publications(self.store, State("redis://127.0.0.1:1", "ranks"), 9, READY_WITHIN_S)
        parts = {
            "orchestrator": (batch_pb2_grpc.add_BatchServiceServicer_to_server, self.orchestrator, "BatchService"),
            "broadcaster": (
                broadcast_pb2_grpc.add_BroadcastServiceServicer_to_server,
                BroadcastServicer(self.store, publications),
                "BroadcastService",
            ),
            "holder": (rows_pb2_grpc.add_RowsServiceServicer_to_server, self.holder, "RowsService"),
        }
        servers: list[grpc.aio.Server] = []
        for name, part in parts.items():
            server, port = build_server(ServiceConfig(), [part])
            await server.start()
            servers.append(server)
            self.addresses[name] = f"127.0.0.1:{port}"
        for step in range(1, STEPS + 1):
            self._seal(step, data_ranks)
        try:
            yield
        finally:
            for server in servers:
                await server.stop(grace=None)

    def _seal(self, step: int, data_ranks: int) -> None:
        sequences = [self._sequence(step, index) for index in range(len(LENGTHS))]
        lengths = [length for length, _ in LENGTHS]
        for rank, micro_batches in enumerate(pack(lengths, 32, data_ranks)):
            self.orchestrator.plans[step, rank] = batch_pb2.Plan(
                version=types_pb2.PolicyVersion(incarnation=1, step=step),
                micro_batches=[
                    batch_pb2.MicroBatch(sequences=[sequences[index] for index in batch]) for batch in micro_batches
                ],
                loss_token_count=sum(trained for _, trained in LENGTHS),
                sequence_count=len(LENGTHS),
                token_count=sum(lengths),
                last=step == STEPS,
            )

    def _sequence(self, step: int, index: int) -> batch_pb2.PlannedSequence:
        rng = np.random.default_rng([step, index])
        (length, trained), name = LENGTHS[index], f"{step}.{index}"
        version = types_pb2.PolicyVersion(incarnation=1, step=step - 1)
        routes = rng.random((length - 1, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.uint8)
        return batch_pb2.PlannedSequence(
            rollout_id=name,
            token_count=length,
            advantage=(-1.0) ** index,
            loss_ranges=[types_pb2.RowRange(start=length - trained, end=length)],
            spans=[types_pb2.VersionSpan(token_count=trained, version=version, kv_oldest_version=version)],
            token_ids=self._ref(f"t/{name}", rng.integers(0, 24, length).astype(np.int32), index != LOST),
            logprobs=self._ref(f"l/{name}", np.full(length, -3.0, np.float32)),
            routes=[self._ref(f"r/{name}", routes, index != UNROUTED)],
        )

    def _ref(self, key: str, rows: np.ndarray, held: bool = True) -> types_pb2.RowsRef:
        if held:
            self.holder.rows[key] = rows
        return types_pb2.RowsRef(
            holder=self.addresses["holder"],
            key=key,
            dtype=str(rows.dtype),
            row_shape=rows.shape[1:],
            ranges=[types_pb2.RowRange(start=0, end=len(rows))],
            size_bytes=rows.nbytes,
        )

    def start(self, ranks: int, parallel: ParallelConfig) -> list[subprocess.Popen[bytes]]:
        """One process a rank, as the launcher starts them."""
        lease = PortLease(self.directory / "ports")
        ports = take_ports(["meeting", "listen"], lease)
        lease.close()
        meeting, self.address = ports["meeting"], ports["listen"]
        processes = []
        for rank in range(ranks):
            where = f"tcp://{meeting}" if ranks > 1 else ""
            group = RankConfig(rank=rank, rank_count=ranks, rendezvous=where)
            name = f"trainer-{rank}" if rank else "trainer"
            processes.append(self._run("-m", "slipstream.trainer", "@", self._config(name, parallel, group), name=rank))
        return processes

    def start_by_torchrun(self, ranks: int, parallel: ParallelConfig) -> list[subprocess.Popen[bytes]]:
        """One process, which starts a rank each from the same file."""
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        file = self._config("trainer", parallel, RankConfig())
        return [self._run(*torchrun, "-m", "slipstream.trainer", "@", file, name=0)]

    def _config(self, replica: str, parallel: ParallelConfig, group: RankConfig) -> str:
        config = TrainerConfig(
            run_dir=self.directory,
            replica=replica,
            orchestrator=self.addresses["orchestrator"],
            broadcaster=self.addresses["broadcaster"],
            model=MODEL,
            sft=SftConfig(enabled=False),
            optim=OptimConfig(lr=1e-3, warmup_steps=0, balance_coefficient=0.01),
            parallel=parallel,
            group=group,
            listen=ListenConfig(port=0 if group.rank else port_of(self.address)),
            checkpoint=CheckpointConfig(interval_steps=self.checkpoint_interval_steps),
            rows_timeout_s=10.0,
        )
        file = self.directory / f"{replica}.toml"
        file.write_text(dump_toml(config))
        return str(file)

    def _run(self, *arguments: str, name: int) -> subprocess.Popen[bytes]:
        with (self.directory / f"rank-{name}.out").open("wb") as output:
            return subprocess.Popen([sys.executable, *arguments], stdout=output, stderr=output)

    def said(self, rank: int) -> str:
        return (self.directory / f"rank-{rank}.out").read_text()


async def end(processes: list[subprocess.Popen[bytes]], number: signal.Signals = signal.SIGTERM) -> list[int]:
    for process in processes:
        process.send_signal(number)
    try:
        return [await asyncio.to_thread(process.wait, ENDS_WITHIN_S) for process in processes]
    finally:
        for process in processes:
            process.kill()


async def until(process: subprocess.Popen[bytes], happened: Any, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not happened():
            assert process.poll() is None
            await asyncio.sleep(0.1)


async def trained(
    directory: Path, ranks: int, parallel: ParallelConfig, by_torchrun: bool = False
) -> tuple[World, dict[str, np.ndarray]]:
    """What was reported and written of a whole run of so many ranks."""
    world = World(directory)
    final = directory / "checkpoints" / "final" / "config.json"
    async with world.serve(parallel.layout(ranks).data):
        processes = world.start_by_torchrun(ranks, parallel) if by_torchrun else world.start(ranks, parallel)
        try:
            await until(
                processes[0], lambda: final.exists() and len(world.orchestrator.reports) > STEPS, READY_WITHIN_S
            )
        except (AssertionError, TimeoutError):
            raise AssertionError("\n".join(map(world.said, range(len(processes))))) from None
        finally:
            codes = await end(processes)
    assert by_torchrun or codes == [0] * ranks, "\n".join(map(world.said, range(ranks)))
    return world, load_file(final.with_name("model.safetensors"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, dict[str, np.ndarray]]:
    return asyncio.run(trained(tmp_path_factory.mktemp("alone"), 1, ParallelConfig()))


TWO = {"data": ParallelConfig(data=2), "context": ParallelConfig(context=2, context_kind="ring", expert=2)}


@pytest.mark.parametrize(("shared", "by_torchrun"), [("data", True), ("context", False)])
async def test_two_ranks_train_what_one_does(shared, by_torchrun, alone, tmp_path):
    expected, weights = alone
    world, found = await trained(tmp_path, 2, TWO[shared], by_torchrun)
    assert [report.version.step for report in world.orchestrator.reports] == [0, 1, 2]  # rank 0 reports, once
    for mine, theirs in zip(world.orchestrator.reports[1:], expected.orchestrator.reports[1:], strict=True):
        for name in SAME:
            assert mine.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-4, abs=1e-6), name
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=2e-5, err_msg=name)
    # Each rank published what it has, and fetched the routes that it needs: together, of every row one.
    manifest = world.store.manifest(PolicyVersion(1, STEPS))
    assert sum(part.size_bytes for part in manifest.slices) == sum(values.nbytes for values in weights.values())
    assert len({part.offsets for part in manifest.slices if part.name == "lm_head.weight"}) == 2
    assert world.holder.route_bytes == expected.holder.route_bytes


async def test_a_rank_that_stands_still_ends_the_others_in_time_and_by_name(tmp_path):
    world = World(tmp_path)
    world.orchestrator.held_back = 2
    async with world.serve(2):
        processes = world.start(2, ParallelConfig(data=2, timeout_s=15.0))
        try:
            await until(processes[0], world.orchestrator.reported.is_set, READY_WITHIN_S)
            standstill.stop(processes[1].pid)
            world.orchestrator.held_back = 0
            assert await asyncio.to_thread(processes[0].wait, ENDS_WITHIN_S) == 1
        finally:
            await end(processes, signal.SIGKILL)
    assert world.said(0).strip().endswith("rank 1 of the trainer does not answer")


async def resumed(directory: Path, ranks: int) -> tuple[World, dict[str, np.ndarray]]:
    """What so many ranks report and write that go on from what is in a directory."""
    world = World(directory)
    world.checkpoint_interval_steps = 1
    final = directory / "checkpoints" / "final" / "config.json"
    async with world.serve(ranks):
        processes = world.start(ranks, ParallelConfig(data=ranks))
        try:
            await until(processes[0], lambda: final.exists() and len(world.orchestrator.reports) > 1, READY_WITHIN_S)
        except (AssertionError, TimeoutError):
            raise AssertionError("\n".join(map(world.said, range(ranks)))) from None
        finally:
            await end(processes)
    return world, load_file(final.with_name("model.safetensors"))


async def test_two_ranks_that_were_killed_are_gone_on_from_by_two_or_by_one(alone, tmp_path):
    expected, weights = alone
    world = World(tmp_path / "two")
    world.checkpoint_interval_steps = 100
    world.orchestrator.held_back = 2
    saved = tmp_path / "two" / "checkpoints" / "1.1" / "COMPLETE"
    async with world.serve(2):
        processes = world.start(2, ParallelConfig(data=2))
        try:
            await until(processes[0], world.orchestrator.reported.is_set, READY_WITHIN_S)
            async with open_channel(world.address, Access()) as channel:  # asked for long before its interval
                request = trainer_pb2.SaveCheckpointRequest(request_id="now")
                answer = await trainer_pb2_grpc.TrainerServiceStub(channel).SaveCheckpoint(
                    request, timeout=ENDS_WITHIN_S
                )
            assert PolicyVersion.from_proto(answer.version) == PolicyVersion(1, 1)
        except (AssertionError, TimeoutError):
            raise AssertionError("\n".join(map(world.said, range(2)))) from None
        finally:
            await end(processes, signal.SIGKILL)
    assert len(list(saved.parent.glob("rank-*.safetensors"))) == 2
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    for ranks, folder in ((2, "two"), (1, "one")):
        again, found = await resumed(tmp_path / folder, ranks)
        reports = again.orchestrator.reports
        assert [str(PolicyVersion.from_proto(report.version)) for report in reports] == ["2.1", "2.2"]
        for mine, theirs in zip(reports, expected.orchestrator.reports[1:], strict=True):
            for name in ("loss", "grad_norm", "loss_tokens"):
                assert mine.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-4, abs=1e-6), name
        for name, values in weights.items():
            np.testing.assert_allclose(found[name], values, rtol=0, atol=2e-5, err_msg=name)
