"""Starting a worker process: model sizes, engine, channels, then `serve`. Imports torch through the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog

from slipstream.api.inference.v1 import worker_pb2
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.channels import Channels
from slipstream.common.config import ConfigError
from slipstream.common.exits import ServiceFailed
from slipstream.common.runtime import keep_freed_memory, serve
from slipstream.common.state import State
from slipstream.engine.base import ReceivingEngine
from slipstream.engine.vllm.config import VllmConfig
from slipstream.engine.vllm.kernels import missing
from slipstream.engine.vllm.parallel import Case, DataParallelRank, refusals
from slipstream.engine.worker import telemetry
from slipstream.engine.worker.config import WorkerConfig
from slipstream.engine.worker.worker import RunningEngine, Servicer, Worker
from slipstream.models.base import Sizes
from slipstream.models.registry import CONFIG_FILE, load_sizes
from slipstream.weights.straight.transport import StraightWeightTransport
from slipstream.weights.transport import GrpcWeightTransport

log = structlog.get_logger()


@dataclass
class Pool:
    """What one pool adds to a worker."""

    servicers: list[Servicer]
    loops: Mapping[str, Callable[[], Awaitable[Any]]] = field(default_factory=dict)
    close: Callable[[], Awaitable[Any]] | None = None


async def run_worker(
    config: WorkerConfig, role: worker_pb2.WorkerRole, build_pool: Callable[[Worker, Access], Pool]
) -> None:
    """Serve until SIGTERM."""
    keep_freed_memory()
    access = Access.from_config(config)
    sizes = await _model_sizes(config)
    engine = _build_engine(config, role, sizes)
    await engine.start()  # before any channel or server: vLLM forks, and gRPC does not survive that
    if config.weights.straight and isinstance(engine, ReceivingEngine):
        try:
            await engine.check_room(config.weights.transport)
        except BaseException:
            await engine.stop()
            raise
    state = State(config.redis.url, config.run_id)
    channel = open_channel(config.broadcaster, access)
    ranks = Channels(lambda address: open_channel(address, access))
    transport = _transport(config, engine, channel, ranks.get)
    worker = Worker(config, role, engine, transport, state, ranks.get)
    pool = build_pool(worker, access)
    try:
        await serve(
            config,
            [*worker.servicers(), *pool.servicers],
            {**worker.loops(), **pool.loops},
            on_drain=worker.gate.drain,
            on_start=worker.bound,
            able=lambda: not engine.silent_s,
        )
    finally:
        if pool.close is not None:
            await pool.close()
        await worker.close()
        await channel.close()
        await ranks.close()
        await state.close()


def _build_engine(config: WorkerConfig, role: worker_pb2.WorkerRole, sizes: Sizes) -> RunningEngine:
    if isinstance(config.engine, VllmConfig):
        from slipstream.engine.vllm.engine import VllmEngine

        parallel = config.engine.parallel
        pool = "prefill" if role == worker_pb2.WORKER_ROLE_PREFILL else "decode"
        case = Case(parallel, pool, _device(config.engine), config.engine.quantization, sizes)
        for option, sentence in refusals(case):
            raise ConfigError(f"engine.{option} {sentence}")
        if config.weights.transport == "cuda_ipc" and _device(config.engine) != "cuda":
            raise ConfigError("weights.transport is 'cuda_ipc', and vLLM runs on the CPU")
        for kernels in missing(parallel):
            raise ConfigError(f"engine.parallel needs {kernels.name}, and {kernels.detail}; {kernels.step}")
        return VllmEngine(config.model_dir, sizes, config.engine, config.run_id, _rank(config))
    from slipstream.engine.embedded.engine import EmbeddedEngine

    return EmbeddedEngine(sizes, config.engine)


def _transport(
    config: WorkerConfig,
    engine: RunningEngine,
    channel: grpc.aio.Channel,
    open_peer: Callable[[str], grpc.aio.Channel],
) -> GrpcWeightTransport:
    """How this worker's weights come: to the engine itself, where it can receive, or through this process."""
    if not config.weights.straight:
        return GrpcWeightTransport(channel, config.fetch_timeout_s)
    if isinstance(engine, ReceivingEngine):
        receive = engine.receive
    else:
        from slipstream.weights.straight.host import HostReceiver

        receive = HostReceiver()
    return StraightWeightTransport(
        channel, config.weights.transport, receive, open_peer, config.fetch_timeout_s, telemetry.weights_fetched
    )


def _device(engine: VllmConfig) -> str:
    import torch

    found = "cpu" if torch.version.cuda is None else "cuda"
    return found if engine.device == "auto" else engine.device


def _rank(config: WorkerConfig) -> DataParallelRank | None:
    group = config.group.place
    if group is None:
        return None
    host, _, port = config.group.rendezvous.rpartition(":")
    if not host:
        raise ConfigError(f"group.rendezvous is {config.group.rendezvous!r}; vLLM's ranks meet at a host:port")
    return DataParallelRank(group.rank, group.size, host, int(port))


async def _model_sizes(config: WorkerConfig) -> Sizes:
    """The model's sizes, as soon as whoever makes the model has written them."""
    path = config.model_dir / CONFIG_FILE
    deadline_s = time.monotonic() + config.model_timeout_s
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise ServiceFailed(f"{path} did not appear in {config.model_timeout_s:g} s")
        await asyncio.sleep(0.2)
    return load_sizes(config.model_dir)
