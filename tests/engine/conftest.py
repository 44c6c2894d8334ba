"""Engines shared by the bodies, and the figures they measured, at the end of the report."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from slipstream.models.checkpoint import save_model
from tests.engine import oracle
from tests.engine.bench import Bench, Factory
from tests.engine.engines import ENGINES, EngineUnderTest, Limits, Vllm
from tests.engine.oracle import weights

_figures: dict[tuple[str, str], float] = {}


@pytest.fixture(scope="package")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of seed 1 as a checkpoint."""
    directory = tmp_path_factory.mktemp("model")
    save_model(weights(1), directory)
    return directory


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run bodies on the engines of `--engine`."""
    if "kind" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--engine")
        kinds = [kind for kind in ENGINES if not chosen or kind.name in chosen]
        metafunc.parametrize("kind", kinds, ids=[kind.name for kind in kinds], indirect=True, scope="package")


@pytest.fixture(scope="package")
def kind(request: pytest.FixtureRequest) -> EngineUnderTest:
    if isinstance(request.param, Vllm):
        options = request.config.option
        return Vllm(options.device, options.dtype, options.connector)
    return request.param


def pytest_configure(config: pytest.Config) -> None:
    oracle.kept_dtype = getattr(torch, config.option.dtype)


@pytest.fixture(scope="package")
def build(kind: EngineUnderTest, model_dir: Path) -> Factory:
    """`async with build(Limits(...)) as bench`: an engine of the body's own. Starting one may take seconds."""
    return Factory(kind, model_dir)


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def _bench(build: Factory) -> AsyncIterator[Bench]:
    async with build() as bench:
        yield bench


@pytest_asyncio.fixture(loop_scope="session")
async def bench(_bench: Bench) -> AsyncIterator[Bench]:
    """The shared engine, on the weights of seed 1. It must be idle again when the body ends."""
    if _bench.seed != 1:
        await _bench.serve(1)
    yield _bench
    await _bench.idle()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def _small(build: Factory) -> AsyncIterator[Bench]:
    async with build(Limits(kv_tokens=576, running_samples=4, waiting_requests=8)) as bench:
        yield bench


@pytest_asyncio.fixture(loop_scope="session")
async def small(_small: Bench) -> AsyncIterator[Bench]:
    """A shared engine that is full soon, on the weights of seed 1."""
    if _small.seed != 1:
        await _small.serve(1)
    yield _small
    await _small.idle()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def _prefiller(_bench: Bench, build: Factory) -> AsyncIterator[Bench]:
    if not _bench.engine.capabilities.prefills:  # there is no prefill pool: bodies see that it refuses
        yield _bench
        return
    async with build() as bench:
        yield bench


@pytest_asyncio.fixture(loop_scope="session")
async def prefiller(_prefiller: Bench) -> AsyncIterator[Bench]:
    """A second engine, of the prefill pool."""
    if _prefiller.seed != 1:
        await _prefiller.serve(1)
    yield _prefiller
    await _prefiller.idle()


@pytest.fixture
def figure(kind: EngineUnderTest) -> Callable[[str, float], None]:
    """Put a measured figure into the report; of several the largest."""

    def record(name: str, value: float) -> None:
        key = (kind.name, name)
        _figures[key] = max(value, _figures.get(key, value))

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _figures:
        terminalreporter.section("engines")
        for (engine, name), value in sorted(_figures.items()):
            terminalreporter.write_line(f"{engine}: {name} {value:.3g}")
