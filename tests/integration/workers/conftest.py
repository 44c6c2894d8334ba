"""A broadcaster, one prefill and two decode workers in this process, over real gRPC, on a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio

from slipstream.api.broadcast.v1 import broadcast_pb2_grpc
from slipstream.api.inference.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from slipstream.api.rollout.v1 import rows_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.broadcaster.config import BroadcasterConfig
from slipstream.broadcaster.publications import Publications
from slipstream.broadcaster.servicer import BroadcastServicer
from slipstream.broadcaster.store import VersionStore
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.channels import Channels
from slipstream.common.config import ListenConfig
from slipstream.common.errors import from_rpc_error
from slipstream.common.runtime import build_server
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.decode.config import DecodeConfig
from slipstream.decode.kv_client import KvClient
from slipstream.decode.servicer import decode_servicers
from slipstream.engine.worker.config import RankGroupConfig
from slipstream.engine.worker.worker import Worker
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.prefill.config import PrefillConfig
from slipstream.prefill.servicer import prefill_servicers
from slipstream.weights.manifest import Manifest, Probe
from slipstream.weights.transport import GrpcWeightTransport
from tests.integration.workers.holding import HoldingEngine
from tests.integration.workers.kinds import KINDS, TRANSFER_TTL_S, Kind
from tests.integration.workers.lending import Lending
from tests.integration.workers.turns import Turns
from tests.ports import free_ports

PROBE_TOKENS = [1, 2, 3, 5, 8, 13]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
WAIT_S = 30.0
"""For what takes milliseconds where nothing else runs."""
LEASE_MS = 60_000
"""Of updates: it ends when `Member.lease_ends` says so, however long calls take."""


def save_model_of(sizes: MoeConfig, directory: Path) -> None:
    from slipstream.models.checkpoint import save_model
    from slipstream.models.qwen3_moe.model import build_model, init_weights

    model = build_model(sizes)
    init_weights(model, 0)
    save_model(model, directory)


class SharedState:
    """Redis as workers and broadcaster see it."""

    def __init__(self) -> None:
        self.versions: dict[str, PolicyVersion] = {}

    async def advance(self, key: str, version: PolicyVersion) -> bool:
        self.versions[key] = version
        return True

    async def version(self, key: str) -> PolicyVersion:
        return self.versions.get(key, UNSET)


class Member:
    """One running worker with stubs for everything it serves."""

    def __init__(self, worker: Worker, server: grpc.aio.Server, kv: KvClient | None) -> None:
        self.worker = worker
        self.server = server
        self.kv = kv
        self.tasks: list[asyncio.Task[Any]] = []
        self.ranks: Channels
        self.made_of: tuple[str, str, dict[str, Any]]
        self.address = worker.identity.address
        self.channel = open_channel(self.address, Access())
        self.control = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.rows = rows_pb2_grpc.RowsServiceStub(self.channel)
        self.prefill = prefill_pb2_grpc.PrefillServiceStub(self.channel)
        self.transfers = prefill_pb2_grpc.KvServiceStub(self.channel)
        self.decode = decode_pb2_grpc.DecodeServiceStub(self.channel)

    @property
    def epoch(self) -> str:
        return self.worker.identity.epoch

    @property
    def engine(self) -> HoldingEngine:
        return cast(HoldingEngine, self.worker.engine)

    async def describe(self) -> worker_pb2.GetWorkerResponse:
        return await self.control.GetWorker(worker_pb2.GetWorkerRequest())

    async def serving(self, version: PolicyVersion) -> None:
        """Wait until it serves `version`."""
        async with asyncio.timeout(WAIT_S):
            while self.worker.updates.version != version:  # noqa: ASYNC110 observed from outside
                await asyncio.sleep(0.005)

    async def update(self, version: PolicyVersion, update_id: str = "u") -> worker_pb2.ApplyUpdateResponse:
        """What the version keeper does."""
        begin = worker_pb2.BeginUpdateRequest(
            update_id=update_id, holder="keeper", version=version.to_proto(), lease_ttl_ms=LEASE_MS
        )
        await self.control.BeginUpdate(begin)
        applied = await self.control.ApplyUpdate(worker_pb2.ApplyUpdateRequest(update_id=update_id))
        await self.control.FinishUpdate(worker_pb2.FinishUpdateRequest(update_id=update_id))
        return applied

    async def lease_ends(self) -> None:
        """Have the lease of the open update run out, once nobody calls."""
        update = self.worker.updates._open
        assert update is not None
        async with asyncio.timeout(WAIT_S):
            while update.calls:  # noqa: ASYNC110 observed from outside
                await asyncio.sleep(0.005)
        update.expires_s = 0.0

    async def end_salts(self, dispatched_at: PolicyVersion, running: Sequence[PolicyVersion] = ()) -> int:
        """What the version keeper does when a group ended."""
        request = worker_pb2.EndSaltsRequest(
            worker_epoch=self.epoch,
            running_versions=[version.to_proto() for version in running],
            dispatch_version=dispatched_at.to_proto(),
        )
        return (await self.control.EndSalts(request)).ended_salt_count

    async def freed(self) -> None:
        """Wait until no request holds a block."""
        async with asyncio.timeout(WAIT_S):
            while self.worker.engine.load().blocks_used:  # noqa: ASYNC110 observed from outside
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        await self.channel.close()
        await self.ranks.close()
        await self.server.stop(None)
        for task in self.tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if self.kv is not None:
            await self.kv.close()
        await self.worker.close()


class _PrefillPool:
    """Addresses of a cluster's prefill workers; they come and go, and a test may lead one through a wire."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __contains__(self, address: object) -> bool:
        workers = [member.worker.identity for member in self._cluster.members]
        pool = {worker.address for worker in workers if worker.role == worker_pb2.WORKER_ROLE_PREFILL}
        return address in pool | self._cluster.other_prefill_addresses


class Cluster:
    """The two pools and the broadcaster; models by seed, versions published by the test."""

    def __init__(self, make_config: Callable[..., Any], run_dir: Path, kind: Kind) -> None:
        self.kind = kind
        self.make_config = make_config
        self.run_dir = run_dir
        self.state = SharedState()
        self.members: list[Member] = []
        self.other_prefill_addresses: set[str] = set()
        """Of processes, and of workers that are gone."""
        self.models: dict[PolicyVersion, Any] = {}
        self.sizes = kind.sizes
        self.seeds: dict[PolicyVersion, int] = {}

    async def start(self) -> None:
        self.store = VersionStore(self.run_dir / "versions", 1 << 30)
        self.publications = Publications(self.store, self.state, 3, 60.0)
        servicer = BroadcastServicer(self.store, self.publications)
        add = broadcast_pb2_grpc.add_BroadcastServiceServicer_to_server
        config = self.make_config(BroadcasterConfig)
        service = "slipstream.api.broadcast.v1.BroadcastService"
        self.server, self.port = build_server(config, [(add, servicer, service)])
        await self.server.start()
        self.channel = open_channel(f"127.0.0.1:{self.port}", Access())
        self.transport = GrpcWeightTransport(self.channel)

    async def stop(self) -> None:
        for member in self.members:
            await member.stop()
        await self.channel.close()
        await self.server.stop(None)

    def model(self, version: PolicyVersion) -> Any:
        """The trainer's model of a version; its step is its seed unless it was published with another."""
        from slipstream.models.qwen3_moe.model import build_model, init_weights

        if version not in self.models:
            model = build_model(self.sizes)
            init_weights(model, self.seeds.get(version, version.step))
            self.models[version] = model.eval().requires_grad_(False)
        return self.models[version]

    def model_dir(self) -> Path:
        """Where engines find the model's sizes, and weights to start from."""
        directory = self.run_dir / "model"
        if not directory.exists():
            save_model_of(self.sizes, directory)
        return directory

    def logprobs(self, version: PolicyVersion, token_ids: Sequence[int]) -> Any:
        import torch

        model = self.model(version)
        model.routes.begin()
        return torch.log_softmax(model(torch.tensor([list(token_ids)]))[0], -1)

    def greedy(self, version: PolicyVersion, prompt: Sequence[int], count: int) -> list[int]:
        """The plain loop: one full forward pass for each token."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logprobs(version, tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    async def publish(self, version: PolicyVersion, probe_error: float = 0.0, seed: int | None = None) -> Manifest:
        from slipstream.models.checkpoint import to_hf

        if seed is not None:
            self.seeds[version] = seed
        logprobs = self.logprobs(version, PROBE_TOKENS)
        probe = [float(logprobs[i, token]) + probe_error for i, token in enumerate(PROBE_TOKENS[1:])]
        tensors = {name: tensor.numpy() for name, tensor in to_hf(self.model(version)).items()}
        return await self.transport.publish(version, tensors, Probe(tuple(PROBE_TOKENS), tuple(probe), 1e-3))

    async def add_group(self, kind: str, size: int, vote_timeout_s: float = WAIT_S) -> list[Member]:
        """The ranks of one data-parallel group, the leader first."""
        ports = free_ports(size)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        ranks = []
        for rank, port in enumerate(ports):
            place = {"group_id": f"{kind}-1", "rank": rank, "addresses": addresses}
            group = RankGroupConfig(**place, vote_timeout_s=vote_timeout_s)  # type: ignore[arg-type]
            ranks.append(await self.add_worker(kind, f"{kind}-1-{rank}", listen=ListenConfig(port=port), group=group))
        return ranks

    async def restart(self, member: Member, transport: Any = None, follow: bool = True) -> Member:
        """Another life of a worker, at the same address."""
        if member in self.members:
            self.members.remove(member)
            await member.stop()
        kind, replica, fields = member.made_of
        listen = ListenConfig(port=int(member.address.rpartition(":")[2]))
        again = await self.add_worker(kind, replica, transport, follow, **{**fields, "listen": listen})
        async with asyncio.timeout(WAIT_S):  # whoever called the dead one has made its address wait for a second or two
            await again.channel.channel_ready()
        return again

    async def kill(self, member: Member) -> None:
        """As a process dies: whoever waits for an answer hears at once that the connection broke."""
        self.members.remove(member)
        await member.server.stop(None)
        await member.stop()

    async def add_worker(
        self, kind: str, replica: str = "", transport: Any = None, follow: bool = True, **fields: Any
    ) -> Member:
        """`follow`: it refits itself, and prefetches what is published."""
        config_class = PrefillConfig if kind == "prefill" else DecodeConfig
        config = self.make_config(config_class, replica=replica or f"{kind}-1", **fields)
        engine: Any = HoldingEngine(self.kind.build(self.model_dir(), self.sizes, fields.get("engine")))
        ranks = Channels(lambda address: open_channel(address, Access()))
        await engine.start()
        transport = transport or GrpcWeightTransport(self.channel)
        kv = None
        if kind == "prefill":
            worker = Worker(config, worker_pb2.WORKER_ROLE_PREFILL, engine, transport, self.state, ranks.get)
            servicers = prefill_servicers(worker, TRANSFER_TTL_S)
        else:
            worker = Worker(config, worker_pb2.WORKER_ROLE_DECODE, engine, transport, self.state, ranks.get)
            kv = KvClient(Access(), _PrefillPool(self), config.kv_timeout_s, limit_bytes=1 << 24)
            servicers = decode_servicers(worker, kv)
        server, port = build_server(config, [*worker.servicers(), *servicers])
        await server.start()
        await worker.bound(port)
        member = Member(worker, server, kv)
        member.ranks = ranks
        member.made_of = (kind, replica, fields)
        loops: list[Coroutine[Any, Any, Any]] = [worker.observe()]
        loops += [worker.updates.follow()] if follow else []
        loops += [kv.release_for_ever(0.05)] if kv else []
        member.tasks = [asyncio.get_running_loop().create_task(loop) for loop in loops]
        self.members.append(member)
        return member

    def prefill_request(self, member: Member, request_id: str = "g.0", **fields: Any) -> prefill_pb2.PrefillRequest:
        prompt = prefill_pb2.Prompt(new_token_ids=fields.pop("prompt", PROMPT))
        values = {"worker_epoch": member.epoch, "salt": "run/1.1/float32", "capture_routes": True, **fields}
        return prefill_pb2.PrefillRequest(request_id=request_id, prompt=prompt, **values)

    def decode_request(
        self, member: Member, kv: prefill_pb2.KvHandle | None, request_id: str = "g.0", samples: int = 1, **fields: Any
    ) -> decode_pb2.DecodeRequest:
        prompt = prefill_pb2.Prompt(new_token_ids=fields.pop("prompt", PROMPT))
        sampling = types_pb2.Sampling(**{"max_new_tokens": 8, "seed": 7, **fields.pop("sampling", {})})
        values = {"worker_epoch": member.epoch, "salt": "run/1.1/float32", "capture_routes": True, **fields}
        return decode_pb2.DecodeRequest(
            request_id=request_id,
            prompt=prompt,
            kv=kv,
            sample_ids=[f"{request_id}.{index}" for index in range(samples)],
            sampling=sampling,
            **values,
        )

    async def samples(self, member: Member, request: decode_pb2.DecodeRequest) -> list[decode_pb2.SampleChunk]:
        """All chunks of each sample put together."""
        whole = [decode_pb2.SampleChunk(sample_index=index) for index in range(len(request.sample_ids))]
        async for message in member.decode.Decode(request, timeout=2 * WAIT_S):
            for chunk in message.chunks:
                whole[chunk.sample_index].MergeFrom(chunk)
        return whole


async def reason_of(call: Any) -> str:
    """The reason a call is refused with."""

    async def run() -> None:
        if not hasattr(call, "__aiter__"):
            await call
            return
        async for _ in call:
            pass

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await run()
    return from_rpc_error(refused.value).reason


@pytest.fixture
def refusal() -> Callable[[Any], Coroutine[Any, Any, str]]:
    return reason_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the bodies of a module on all the engines it names in `ENGINES`, unless `--engine` chooses."""
    names = getattr(metafunc.module, "ENGINES", None)
    if names and "kind" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--engine")
        names = [name for name in names if not chosen or name in chosen]
        metafunc.parametrize("kind", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest) -> Kind:
    """The engine of the workers: embedded, unless the module or `--engine` says another."""
    chosen = "vllm" if "vllm" in (request.config.getoption("--engine") or ()) else "embedded"
    return KINDS[getattr(request, "param", chosen)]()


@asynccontextmanager
async def engines_to_lend(kind: Kind, directory: Path) -> AsyncIterator[Callable[[], Lending]]:
    """Engines of the two pools that run on; each body takes a kind that lends them."""
    engines: list[Any] = []
    save_model_of(kind.sizes, directory)
    if kind.slow_to_start:
        for _ in ("prefill", "decode"):
            engines.append(kind.build(directory, kind.sizes, None))
            await engines[-1].start()
    yield lambda: Lending(kind, engines, directory)
    for engine in engines:
        await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lending(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Callable[[], Lending]]:
    """The kind of a body's engines, of which those of the two pools are up before: `lending()`, once a body.

    For bodies on their module's event loop.
    """
    async with engines_to_lend(kind, tmp_path_factory.mktemp("lending") / "model") as lend:
        yield lend


@asynccontextmanager
async def clustering(make_config: Callable[..., Any], run_dir: Path, kind: Kind) -> AsyncIterator[Cluster]:
    """A broadcaster without versions or workers."""
    cluster = Cluster(make_config, run_dir, kind)
    await cluster.start()
    yield cluster
    await cluster.stop()


async def both_pools(cluster: Cluster) -> Cluster:
    """Version 1.1 served by one prefill and one decode worker."""
    await cluster.publish(PolicyVersion(1, 1))
    for kind in ("prefill", "decode"):
        member = await cluster.add_worker(kind)
        await member.serving(PolicyVersion(1, 1))
    return cluster


@asynccontextmanager
async def routing(cluster: Cluster, valkey_url: str) -> AsyncIterator[Callable[..., Coroutine[Any, Any, Turns]]]:
    """Puts a router before the workers that the cluster has when it is called; fields are those of its config."""
    async with AsyncExitStack() as stack:

        async def start(**fields: Any) -> Turns:
            turns = Turns(cluster)
            await turns.start(stack, valkey_url, **fields)
            return turns

        yield start


@pytest.fixture
async def empty_cluster(make_config, tmp_path, kind) -> AsyncIterator[Cluster]:
    async with clustering(make_config, tmp_path, kind) as cluster:
        yield cluster


@pytest.fixture
async def cluster(empty_cluster) -> Cluster:
    return await both_pools(empty_cluster)


@pytest.fixture
async def start_turns(cluster, valkey_url) -> AsyncIterator[Callable[..., Coroutine[Any, Any, Turns]]]:
    async with routing(cluster, valkey_url) as start:
        yield start
