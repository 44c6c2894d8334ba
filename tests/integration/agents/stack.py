"""Everything that samples, in this process: orchestrator, router, runner, gateway, workers. The test trains."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.api.training.v1 import batch_pb2, batch_pb2_grpc
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.config import ListenConfig, WorkerEndpoint, dump_toml
from slipstream.common.version import PolicyVersion
from slipstream.environments.config import ImportedConfig
from slipstream.gateway import __main__ as gateway
from slipstream.gateway.config import GatewayConfig
from slipstream.orchestrator import __main__ as orchestrator
from slipstream.orchestrator.config import EnvironmentConfig, KeeperConfig, OrchestratorConfig, WorkerConfig
from slipstream.router import __main__ as router
from slipstream.router.config import RouterConfig
from slipstream.runner import __main__ as runner
from slipstream.runner.config import RunnerConfig
from slipstream.trainer.fetch import RowsClient
from slipstream.trainer.portions import PlanReader
from slipstream.trainer.rows import RowForm
from slipstream.trainer.sequence import TrainSequence
from slipstream.trainer.torch_thread import TorchThread
from slipstream_client import AsyncClient
from tests.integration.agents import calling
from tests.integration.workers.conftest import Cluster
from tests.ports import free_ports

SERVICES = Path(__file__).parents[3] / "services"
WINDOW_BYTES = 1 << 24
REMOTE_TOKENS = 256
"""First prompts are longer, what comes with a turn is shorter."""


class CallingCluster(Cluster):
    """Workers whose versions are models that call tools."""

    def model(self, version: PolicyVersion) -> Any:
        if version not in self.models:
            self.models[version] = calling.build(version.step)
        return self.models[version]


@dataclass(frozen=True)
class Trained:
    """A sequence as the plan has it and as the trainer's reader makes it of what runner and workers hold."""

    planned: batch_pb2.PlannedSequence
    made: TrainSequence

    @property
    def tokens(self) -> list[int]:
        return self.made.token_ids.tolist()

    @property
    def said(self) -> list[list[int]]:
        """What was sampled, turn by turn."""
        return [self.tokens[span.start : span.end] for span in self.planned.loss_ranges]

    @property
    def versions(self) -> list[PolicyVersion]:
        """Of each sampled token."""
        spans = [(span.token_count, PolicyVersion.from_proto(span.version)) for span in self.planned.spans]
        return [version for count, version in spans for _ in range(count)]


class Stack:
    """The services, and what the trainer would do."""

    def __init__(self, cluster: CallingCluster) -> None:
        self.cluster = cluster
        self.client: AsyncClient
        self.base_url = ""
        self._step = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._batches: Any = None
        self._torch = TorchThread(1)
        self._rows = RowsClient(lambda address: open_channel(address, Access()), 10.0)

    @property
    def prefiller(self) -> Any:
        """The engine of the prefill pool."""
        return self.cluster.members[0].engine

    @property
    def decoder(self) -> Any:
        """The engine of the decode pool."""
        return self.cluster.members[1].engine

    async def start(self, stack: AsyncExitStack, redis_url: str, **fields: Any) -> None:
        """`fields`: of the orchestrator's config."""
        make, here = self.cluster.make_config, "127.0.0.1"
        ports = dict(zip(("orchestrator", "router", "runner", "gateway"), free_ports(4), strict=True))
        addresses = {name: f"{here}:{port}" for name, port in ports.items()}
        listens = {name: ListenConfig(port=port) for name, port in ports.items()}
        self.base_url = f"http://{addresses['gateway']}/v1"
        replicas = [(member.worker.identity.replica, member.address) for member in self.cluster.members]
        pools = [replica.partition("-")[0] for replica, _ in replicas]
        environment = {"name": "look", "max_new_tokens": 120, "deadline_s": 150.0}
        orchestrator_config = make(
            OrchestratorConfig,
            redis_url=redis_url,
            listen=listens["orchestrator"],
            workers=[
                WorkerConfig(replica=replica, role=pool, address=address)  # type: ignore[arg-type]
                for (replica, address), pool in zip(replicas, pools, strict=True)
            ],
            broadcaster=f"{here}:{self.cluster.port}",
            gateway_url=self.base_url,
            environments=[EnvironmentConfig(**environment)],  # type: ignore[arg-type]
            keeper=KeeperConfig(poll_interval_s=0.05, refit_backoff_s=0.1),
            **{
                "total_steps": 1000,
                "groups_per_step": 1,
                "samples_per_group": 2,
                "min_reward_std": 0.0,
                "pool_timeout_s": 150.0,
                "runner_lease_ttl_s": 60.0,
                "evaluate_before": False,
                "evaluate_after": False,
                **fields,
            },
        )
        endpoints = [WorkerEndpoint(replica=replica, address=address) for replica, address in replicas]
        router_config = make(
            RouterConfig,
            redis_url=redis_url,
            listen=listens["router"],
            prefill_workers=endpoints[:1],
            decode_workers=endpoints[1:],
            remote_prefill_min_uncached_tokens=REMOTE_TOKENS,
        )
        runner_config = make(
            RunnerConfig,
            replica="runner-1",
            listen=listens["runner"],
            orchestrator_address=addresses["orchestrator"],
            router_address=addresses["router"],
            model_dir=calling.write_texts(self.cluster.run_dir / "texts"),
            environments=[ImportedConfig(path="looking:Looking", **environment)],  # type: ignore[arg-type]
            block_size_tokens=calling.BLOCK_TOKENS,
        )
        gateway_config = make(GatewayConfig, orchestrator_address=addresses["orchestrator"], http_port=ports["gateway"])
        file = self.cluster.run_dir / "runner.toml"
        file.write_text(dump_toml(runner_config))
        runs: list[Coroutine[Any, Any, None]] = [
            orchestrator.run(orchestrator_config),
            router.run(router_config),
            runner.run(runner_config, ["@", str(file)]),
            gateway.run(gateway_config),
        ]
        for run in runs:
            self._tasks.append(asyncio.create_task(run))
            stack.push_async_callback(self._end, self._tasks[-1])
        self.client = await stack.enter_async_context(AsyncClient.connect(addresses["orchestrator"]))
        channel = await stack.enter_async_context(open_channel(addresses["orchestrator"], Access()))
        self._batches = batch_pb2_grpc.BatchServiceStub(channel)
        stack.push_async_callback(self._rows.close)
        stack.callback(self._torch.close)
        async with asyncio.timeout(60):
            await channel.channel_ready()
        await self._publish(PolicyVersion(1, 0))

    async def train(self) -> list[Trained]:
        """Take the next step's plan, read its rows, and publish the version that it makes."""
        step = next(self._step)
        while True:
            self.check()
            request = batch_pb2.GetPlanRequest(incarnation=1, step=step, wait_ms=1000)
            answer = await self._batches.GetPlan(request, timeout=60)
            if answer.HasField("plan"):
                break
            assert answer.HasField("pending"), answer
        version = PolicyVersion.from_proto(answer.plan.version)
        before = PolicyVersion(version.incarnation, version.step - 1)
        reader = PlanReader(self._rows, self._torch, WINDOW_BYTES)
        made: list[Any] = []
        async with asyncio.TaskGroup() as group:
            async for portion in reader.read(answer.plan, RowForm.of(self.cluster.model(before), before), group):
                made += itertools.chain.from_iterable(portion.micro_batches)
        planned = [sequence for batch in answer.plan.micro_batches for sequence in batch.sequences]
        assert all(isinstance(each, TrainSequence) for each in made), "rows are lost"
        await self._publish(version)
        return [Trained(*pair) for pair in zip(planned, made, strict=True)]

    def check(self) -> None:
        """Fail if a service has ended."""
        for task in self._tasks:
            if task.done():
                task.result()
                raise AssertionError("a service ended")

    async def _publish(self, version: PolicyVersion) -> None:
        await self.cluster.publish(version)
        request = batch_pb2.ReportStepRequest(request_id=uuid.uuid4().hex, version=version.to_proto())
        await self._batches.ReportStep(request, timeout=60)

    async def _end(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), task.exception()


@asynccontextmanager
async def stacking(cluster: CallingCluster, redis_url: str) -> AsyncIterator[Callable[..., Any]]:
    """`async with stacking(cluster, url) as start: stack = await start(groups_per_step=2)`."""
    async with AsyncExitStack() as exits:

        async def start(**fields: Any) -> Stack:
            stack = Stack(cluster)
            await stack.start(exits, redis_url, **fields)
            return stack

        yield start
