"""Services that the stack of this directory does not run, each by itself under the same fire."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from callers import calling
from contract import rpcs
from stack import Stack
from test_generated import cases, enough, fire

from slipstream.api.broadcast.v1 import broadcast_pb2_grpc
from slipstream.api.inference.v1 import teacher_pb2_grpc
from slipstream.common.config import ListenConfig, ServiceConfig
from slipstream.common.runtime import build_server
from slipstream.models.checkpoint import save_model
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import build_model, init_weights
from slipstream.models.registry import save_sizes
from slipstream.teacher.config import TeacherConfig
from slipstream.teacher.desk import Desk
from slipstream.teacher.engines import OnThread
from slipstream.teacher.scorer import Scorer
from slipstream.teacher.servicer import TeacherServicer
from slipstream.weights.config import WeightsConfig
from slipstream.weights.straight.lending import Lending
from slipstream.weights.straight.source import SERVICE as SOURCE

pytestmark = pytest.mark.timeout(590, func_only=False)

TEACHER = "slipstream.api.inference.v1.TeacherService"
SEED = 1
SIZES = MoeConfig(
    vocab_size=24, dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, expert_dim=16, max_context_tokens=32
)


@asynccontextmanager
async def serving(config: ServiceConfig, *servicer: Any) -> AsyncIterator[str]:
    server, port = build_server(config, [servicer])
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def teacher(directory: Path) -> AsyncIterator[str]:
    """A small model that judges tokens."""
    model = build_model(SIZES)
    init_weights(model, 3)
    save_model(model, directory)
    save_sizes(SIZES, directory)
    config = TeacherConfig(teacher_model=directory, max_batch_tokens=24, listen=ListenConfig(), run_dir=directory)
    engine = OnThread(Scorer(config), ThreadPoolExecutor(1))
    desk = Desk(engine.score, config.max_batch_tokens, config.max_waiting_tokens)
    judging = asyncio.create_task(desk.run())
    add = teacher_pb2_grpc.add_TeacherServiceServicer_to_server
    try:
        async with serving(config, add, TeacherServicer(config, engine.bounds, desk), TEACHER) as address:
            yield address
            async with asyncio.timeout(60):
                while desk.token_count:  # noqa: ASYNC110 what was refused, or hung up, waits for nobody
                    await asyncio.sleep(0.01)
    finally:
        judging.cancel()
        await engine.stop()


@asynccontextmanager
async def source(directory: Path) -> AsyncIterator[str]:
    """A trainer's rank that lends weights through memory, and has published none."""
    lending = Lending(WeightsConfig.model_validate({"transport": "shm"}))
    config = ServiceConfig(listen=ListenConfig(), run_dir=directory)
    add = broadcast_pb2_grpc.add_WeightSourceServiceServicer_to_server
    try:
        async with serving(config, add, lending.servicer, SOURCE) as address:
            lending.address = address
            lending.begin(torch.device("cpu"))
            yield address
    finally:
        await asyncio.to_thread(lending.close)


ALONE: dict[str, Callable[[Path], AbstractAsyncContextManager[str]]] = {TEACHER: teacher, SOURCE: source}


@pytest.mark.parametrize("service", ALONE)
async def test_every_request_near_the_proto_gets_a_documented_status(service: str, tmp_path: Path) -> None:
    nothing: Any = SimpleNamespace(endpoints={"prefill-1": "127.0.0.1:1"})
    async with ALONE[service](tmp_path) as address, calling(address, None) as caller:
        todo = list(cases(nothing, rpcs()[service], random.Random(f"{SEED} {service}"), ""))
        assert enough(todo, service)
        faults = await fire(caller, iter(todo))
        assert not faults, f"{service}: {len(faults)}\n" + "\n".join(faults[:40])


def test_every_service_of_the_contract_is_under_fire(stack: Stack) -> None:
    served = {service for services in stack.served.values() for service in services}
    assert rpcs().keys() == served | ALONE.keys()
