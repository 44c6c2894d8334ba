"""A whole sampling side on two vLLM engines, which run on from body to body."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.integration.agents.calling import Callers
from tests.integration.agents.stack import SERVICES, CallingCluster, stacking
from tests.integration.workers.conftest import engines_to_lend


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def _engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Callable[[], Any]]:
    async with engines_to_lend(Callers(), tmp_path_factory.mktemp("agents") / "model") as lend:
        yield lend


@pytest_asyncio.fixture(loop_scope="session")
async def start_stack(
    make_config: Callable[..., Any],
    tmp_path: Path,
    _engines: Callable[[], Any],
    valkey_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Callable[..., Any]]:
    """`stack = await start_stack()`: one prefill and one decode worker, and all before them."""
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SERVICES), here, os.environ.get("PYTHONPATH", "")]))
    cluster = CallingCluster(make_config, tmp_path, _engines())
    await cluster.start()
    for pool in ("prefill", "decode"):
        await cluster.add_worker(pool)
    async with stacking(cluster, valkey_url) as start:
        yield start
    await cluster.stop()
