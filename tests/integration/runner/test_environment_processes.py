"""What one process of an environment costs the others, and the runner: nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.common.config import ListenConfig, dump_toml
from slipstream.common.errors import EnvironmentFailed
from slipstream.environments.config import ImportedConfig
from slipstream.environments.tokenizer import TOKENIZER_FILE, TextCodec, build_tokenizer
from slipstream.runner.config import RunnerConfig
from slipstream.runner.envclient import OpenEpisode, TaskKey
from slipstream.runner.envpool import EnvironmentPool

CODEC = TextCodec(build_tokenizer())
FINISHED, FAILED = runner_pb2.GROUP_OUTCOME_FINISHED, runner_pb2.GROUP_OUTCOME_FAILED
MIB = 2**20


def counting(behaviour: str, file: Path, **fields: Any) -> ImportedConfig:
    options = {"behaviour": behaviour, "file": str(file)}
    return ImportedConfig(name="good", path="small_environment:Counting", options=options, **fields)


async def test_an_episode_that_blocks_fails_alone_and_those_beside_it_go_on(start_world: Any, tmp_path: Path) -> None:
    options = {"behaviour": "blocks once", "folder": str(tmp_path)}
    section = ImportedConfig(name="turns", path="small_episodes:CountingDown", options=options)
    world = await start_world(environments=[section], environment_blocked_timeout_s=2.0)
    report = await world.report(await world.give("turns", task_index=3, samples=3))
    assert (report.outcome, [record.sample_index for record in report.rollouts]) == (FINISHED, [0, 2])
    assert [(record.reward, record.turn_count) for record in report.rollouts] == [(1.0, 3), (1.0, 3)]
    (failure,) = report.failures
    assert (failure.sample_index, failure.reason) == (1, "ENVIRONMENT_TIMEOUT")
    assert failure.detail.startswith("environment code held its process for 2 s without awaiting anything: ")
    assert "small_episodes.py" in failure.detail
    # Nothing was sampled again for it: the first turn is one request, then two for each that went on, one for it.
    decodes = [request for worker in world.workers.values() for request in worker.decodes]
    assert len(decodes) == 1 + 2 + 2 + 1


async def test_a_group_whose_judge_blocks_fails_alone(start_world: Any, tmp_path: Path) -> None:
    file = tmp_path / "go"
    world = await start_world(environments=[counting("blocks at 13", file)], environment_blocked_timeout_s=2.0)
    waiting = await world.give(task_index=7)
    await world.until(file.with_suffix(".asked").exists)
    report = await world.report(await world.give(task_index=13))
    assert (report.outcome, report.reason) == (FAILED, "ENVIRONMENT_TIMEOUT")
    file.touch()
    assert (await world.report(waiting)).outcome == FINISHED


@pytest.mark.parametrize(
    ("behaviour", "reason", "detail"),
    [
        ("leaks", "ENVIRONMENT_MEMORY", f"the environment's process held more than memory_limit_bytes = {300 * MIB}"),
        ("takes it at once", "ENVIRONMENT_ERROR", "MemoryError: "),
    ],
)
async def test_a_process_of_an_environment_has_a_bound_of_memory(
    start_world: Any, tmp_path: Path, behaviour: str, reason: str, detail: str
) -> None:
    bad = counting(behaviour, tmp_path / "none", memory_limit_bytes=300 * MIB)
    other = ImportedConfig(name="other", path="small_environment:Counting")
    world = await start_world(environments=[bad, other])
    lost, good = await world.give(), await world.give("other")
    assert (await world.report(good)).outcome == FINISHED
    report = await world.report(lost)
    assert (report.outcome, report.reason, report.detail) == (FAILED, reason, detail)


@asynccontextmanager
async def running_pool(
    tmp_path: Path, make_config: Callable[..., Any], sections: list[ImportedConfig]
) -> AsyncIterator[EnvironmentPool]:
    (tmp_path / "model").mkdir()
    build_tokenizer().save(str(tmp_path / "model" / TOKENIZER_FILE))
    (tmp_path / "model" / "config.json").write_text(json.dumps({}))
    config = make_config(RunnerConfig, listen=ListenConfig(port=1), model_dir=tmp_path / "model", environments=sections)
    (tmp_path / "runner.toml").write_text(dump_toml(config))
    pool = EnvironmentPool(["@", str(tmp_path / "runner.toml")], 60.0, sections)
    running = asyncio.create_task(pool.run())
    try:
        async with asyncio.timeout(60):
            while not pool.ready:  # noqa: ASYNC110 processes start
                await asyncio.sleep(0.02)
            yield pool
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_of_several_processes_one_that_dies_costs_its_own_episodes(
    start_world: Any, tmp_path: Path, make_config: Callable[..., Any]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    options = {"behaviour": "names its process", "folder": str(folder)}
    section = ImportedConfig(name="turns", path="small_episodes:CountingDown", options=options, workers=2)
    async with running_pool(tmp_path, make_config, [section]) as pool:
        task = TaskKey("turns", "train", 2)
        episodes: list[OpenEpisode] = []
        for _ in range(2):  # the second goes where nothing is open
            (member,) = (await pool.open(task, 1)).members
            assert isinstance(member, OpenEpisode)
            episodes.append(member)
        processes = [int(episode.text.split("\n")[0].split()[-1]) for episode in episodes]
        assert len(set(processes)) == 2
        os.kill(processes[1], signal.SIGKILL)
        says = [*CODEC.encode("2"), CODEC.end_id]
        with pytest.raises(EnvironmentFailed, match="the environment worker"):
            await pool.turn(task, episodes[1].number, says, stopped=True)
        assert await pool.turn(task, episodes[0].number, says, stopped=True) is not None


@pytest.mark.parametrize(
    "behaviour",
    [
        "leaves a process",
        "leaves a process and dies",
        "leaves a process and hangs",
        "leaves a process and kills its parent",
        "leaves a process and stops those that guard it",
    ],
)
async def test_what_environment_code_started_ends_with_its_process(
    start_world: Any, tmp_path: Path, behaviour: str
) -> None:
    """Also in a session of its own, and when the one who started it has ended."""
    left = tmp_path / "left"
    world = await start_world(environments=[counting(behaviour, left)], environment_blocked_timeout_s=2.0)
    report = await world.report(await world.give())
    assert report.outcome == (FINISHED if behaviour == "leaves a process" else FAILED)
    pid = int(left.read_text())
    if behaviour == "leaves a process":
        assert psutil.pid_exists(pid)  # it does no harm while its environment runs
        world.ask_to_stop()
        await asyncio.wait([world.process], timeout=60.0)
    async with asyncio.timeout(60):
        while psutil.pid_exists(pid):  # noqa: ASYNC110 the kernel ends it
            await asyncio.sleep(0.02)
