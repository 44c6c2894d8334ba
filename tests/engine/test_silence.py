"""An engine that stands still: its streams end within a bound, it says so, and it is as before when it goes on."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.common.errors import RequestAborted
from slipstream.common.exits import ServiceFailed
from slipstream.common.version import PolicyVersion
from slipstream.engine.pulse import ASK_INTERVAL_S
from slipstream.engine.vllm import launch
from slipstream.engine.vllm.calls import CoreEnded
from tests import standstill
from tests.engine.bench import Bench, Factory, prompt_of, until
from tests.engine.engines import SILENCE_S, Limits, Vllm, sharp
from tests.engine.oracle import tensors

pytestmark = pytest.mark.asyncio(loop_scope="session")

ENDS_S = 30.0
"""Of a busy machine: whoever notices nothing waits as long as the engine stands still."""
DEATH_TOLD_S = 30.0
DIES_S = 0.5
START_S = 40.0
"""More than a start takes on a busy machine."""


def stop(llm: Any) -> int:
    """vLLM's process, whose id is returned, answers nothing that it is asked from now on."""
    (core,) = llm.engine_core.resources.engine_manager.processes
    standstill.stop(core.pid)
    return core.pid


def stop_and_kill(llm: Any) -> None:
    """And dies a little later."""
    asyncio.get_running_loop().call_later(DIES_S, os.kill, stop(llm), signal.SIGKILL)


def when_up(monkeypatch: pytest.MonkeyPatch, act: Callable[[Any], object]) -> None:
    """Have this done to vLLM as soon as its processes are up, before anything is asked of them."""
    original = launch.launch

    def launched(*asked: Any) -> Any:
        llm = original(*asked)
        act(llm)
        return llm

    monkeypatch.setattr(launch, "launch", launched)


@pytest.fixture
def left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], set[str]]]:
    """What there is in a temporary directory of this body's own: other engines of the machine come and go in theirs."""
    with tempfile.TemporaryDirectory(prefix="slip-") as directory:  # the path of a Unix socket has at most 107 bytes
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield lambda: {path.name for path in Path(directory).iterdir() if path.name.startswith(("vllm_dist_", "slip"))}


async def test_what_an_engine_that_stands_still_runs_ends_within_the_bound_and_is_freed_when_it_goes_on(
    bench: Bench,
):
    engine, prompt = bench.engine, prompt_of(11)
    expected = await bench.greedy(prompt)
    running = [asyncio.create_task(bench.ask(prompt_of(9, seed=n), 2, max_new_tokens=190)) for n in range(2)]
    await until(lambda: engine.load().running_samples == 4, "four running samples")
    assert engine.silent_s == 0
    silent_s: list[float] = []
    for task in running:
        task.add_done_callback(lambda task: silent_s.append(engine.silent_s))
    with bench.kind.standing_still(engine):
        done, _ = await asyncio.wait(running, timeout=ENDS_S)
        assert len(done) == 2
        assert min(silent_s) > SILENCE_S, "none ends before"
        assert all(isinstance(task.exception(), RequestAborted) for task in running)
        assert engine.silent_s > SILENCE_S
        await until(lambda: engine.silent_s > SILENCE_S + 0.2, "it counts on")
    await until(lambda: engine.silent_s == 0, "a sign of life")
    await bench.idle()  # what it held for them is free
    assert await bench.greedy(prompt) == expected


async def test_an_engine_held_in_an_update_is_not_taken_for_one_that_stands_still(bench: Bench):
    engine, old = bench.engine, bench.version
    version = PolicyVersion(old.incarnation, old.step + 1)
    running = asyncio.create_task(bench.ask(prompt_of(9), max_new_tokens=150))
    await until(lambda: engine.load().running_samples == 1, "a running sample")
    silences: list[float] = []

    def verify(paused: object) -> None:
        deadline_s = time.monotonic() + SILENCE_S + 2 * ASK_INTERVAL_S
        while time.monotonic() < deadline_s:
            time.sleep(0.05)
            silences.append(engine.silent_s)

    with sharp(engine):
        await engine.update(version, tensors(2), verify)
    bench.version, bench.seed = version, 2
    (sample,) = await running
    assert len(sample.token_ids) == 150
    assert silences
    assert not any(silences)


async def test_the_end_of_an_engines_process_is_told_with_its_cause_and_leaves_nothing_behind(
    build: Factory, left_behind: Callable[[], set[str]]
):
    if not isinstance(build.kind, Vllm):
        return  # it has none
    async with build() as bench:
        (core,) = bench.engine._llm.engine_core.resources.engine_manager.processes  # type: ignore[attr-defined]
        os.kill(core.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="was killed by SIGKILL; the kernel does that where memory runs out"):
            async with asyncio.timeout(60):
                await bench.engine.wait()  # type: ignore[attr-defined]
    assert left_behind() == set()


async def test_a_start_ends_with_the_engines_process(
    build: Factory, monkeypatch: pytest.MonkeyPatch, left_behind: Callable[[], set[str]]
):
    if not isinstance(build.kind, Vllm):
        return

    def up(llm: Any) -> None:
        stop_and_kill(llm)
        deadline.reschedule(asyncio.get_running_loop().time() + DEATH_TOLD_S)  # the loop stood still meanwhile

    when_up(monkeypatch, up)
    engine = build.kind.new(build.model_dir, Limits())
    with pytest.raises(CoreEnded, match="was killed by SIGKILL"):
        async with asyncio.timeout(None) as deadline:
            await engine.start()
    assert left_behind() == set()


def stand_still(*asked: Any, **named: Any) -> None:
    """What vLLM's process does instead of starting."""
    time.sleep(120)


@pytest.mark.filterwarnings("ignore:.*Context.__del__:pytest.PytestUnraisableExceptionWarning")
async def test_a_start_that_stands_still_ends_within_its_limit_and_says_where(
    build: Factory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    left_behind: Callable[[], set[str]],
):
    if not isinstance(build.kind, Vllm) or build.kind.device != "cpu":  # elsewhere it is spawned, and starts after all
        return
    from vllm.v1.engine.core import EngineCoreProc

    monkeypatch.setattr(EngineCoreProc, "run_engine_core", stand_still)
    processes = multiprocessing.active_children()
    engine = build.kind.new(build.model_dir, Limits(), start_timeout_s=5.0)
    began_s = time.monotonic()
    with pytest.raises(ServiceFailed, match=r"was not up within engine\.start_timeout_s = 5 s"):
        await engine.start()
    assert time.monotonic() - began_s < ENDS_S
    del engine
    gc.collect()  # vLLM leaves the context of its sockets open where it does not start
    assert "in stand_still" in capfd.readouterr().err
    assert (left_behind(), multiprocessing.active_children()) == (set(), processes)


async def test_a_start_ends_where_vllm_is_up_and_never_answers(
    build: Factory, monkeypatch: pytest.MonkeyPatch, left_behind: Callable[[], set[str]]
):
    if not isinstance(build.kind, Vllm):
        return
    when_up(monkeypatch, stop)
    engine = build.kind.new(build.model_dir, Limits(), start_timeout_s=START_S)
    with pytest.raises(ServiceFailed, match=r"was not up within engine\.start_timeout_s"):
        await engine.start()
    assert left_behind() == set()


async def test_all_that_waits_for_an_engines_process_ends_with_it(build: Factory):
    if not isinstance(build.kind, Vllm):
        return
    async with build() as bench:
        engine: Any = bench.engine
        version = PolicyVersion(bench.version.incarnation, bench.version.step + 1)
        stop_and_kill(engine._llm)
        waiting = {
            "update": engine.update(version, tensors(2), lambda paused: None),
            "room": engine.check_room("grpc"),
            "probe": engine.probe(prompt_of(9)),
            "call": engine._llm.collective_rpc("slipstream_alive"),
        }
        tasks = {name: asyncio.create_task(work) for name, work in waiting.items()}
        done, _ = await asyncio.wait(tasks.values(), timeout=DEATH_TOLD_S)
        assert len(done) == len(tasks)
        errors = {name: task.exception() for name, task in tasks.items()}
        for name, error in errors.items():
            assert isinstance(error, CoreEnded), (name, error)
            assert "was killed by SIGKILL" in str(error), (name, error)
        with pytest.raises(CoreEnded, match="was killed by SIGKILL"):  # and who asks later
            await engine.update(version, tensors(2), lambda paused: None)
