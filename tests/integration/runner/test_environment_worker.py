"""Environment code that misbehaves, in a real environment worker."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.common.config import ConfigError
from slipstream.environments.config import ImportedConfig


@pytest.mark.parametrize(
    ("behaviour", "detail"),
    [
        ("raises", "ZeroDivisionError: a bug of its own"),
        ("answers nonsense", "ValueError: a reward must be finite, not nan"),
        ("answers numbers", "TypeError: score of 'answers_numbers' must return Score objects, got float"),
        ("answers hugely", "ValueError: a reward must be within 1e+30 of 0, not 1e+200"),
        ("answers too few", "ValueError: zip"),
        ("exits", "SystemExit: 3"),
        ("cancels", "CancelledError: "),
        ("dies", "the environment worker died"),
        ("forks and dies", "the environment worker died"),
        ("hangs", "environment code held its process for 2 s without awaiting anything: "),
        ("never answers", "environment code did not answer within 4 s"),
        ("talks to the runner", "the environment worker died"),
        ("talks JSON to the runner", "the environment worker died"),
    ],
)
async def test_a_group_whose_environment_fails_is_reported_and_the_next_one_runs(
    start_world: Any, behaviour: str, detail: str
) -> None:
    # Also on a busy machine, the others answer in time.
    slow = behaviour in ("hangs", "never answers")
    world = await start_world(behaviour, environment_timeout_s=4.0 if slow else 60.0)
    report = await world.report(await world.give(behaviour.replace(" ", "_")))
    reason = "ENVIRONMENT_TIMEOUT" if slow else "ENVIRONMENT_ERROR"
    assert (report.outcome, report.reason) == (runner_pb2.GROUP_OUTCOME_FAILED, reason)
    assert report.detail.startswith(detail)
    assert (await world.report(await world.give())).outcome == runner_pb2.GROUP_OUTCOME_FINISHED
    # Nobody will train on the failed group: its routes are not kept.
    await world.until(lambda: "p/g1.1.1" in world.workers["prefill-1"].released_rows)


async def test_a_sandbox_that_is_away_is_no_failure_of_the_environment(start_world: Any) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        world = await start_world("runs code", sandbox_address=address, environment_timeout_s=90.0)
        report = await world.report(await world.give("runs_code"))
        assert (report.outcome, report.reason) == (runner_pb2.GROUP_OUTCOME_FAILED, "SANDBOX_AWAY")
        assert report.detail.startswith("Unreachable: ")
        assert (await world.report(await world.give())).outcome == runner_pb2.GROUP_OUTCOME_FINISHED


async def test_an_environment_without_a_prompt_fails_its_own_groups_only(start_world: Any) -> None:
    world = await start_world("raises at the prompt")
    world.orchestrator.waiting.append(
        runner_pb2.GroupAssignment(
            group_id="bad", attempt=1, environment="raises_at_the_prompt", split="train", deadline_ms=60_000
        )
    )
    good = await world.give()  # handed out in the same answer
    assert (await world.report("bad")).detail == "LookupError: no such task"
    assert (await world.report(good)).outcome == runner_pb2.GROUP_OUTCOME_FINISHED


async def test_prompts_that_cannot_fit_fail_their_own_groups_at_once(start_world: Any, tmp_path: Path) -> None:
    world = await start_world()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 64}')
    names = [f"long-{number}" for number in range(8)]
    world.orchestrator.waiting += [  # together far longer than a line to the environment worker may be
        runner_pb2.GroupAssignment(
            group_id=name,
            attempt=1,
            prompt="\x01" * 2**20,
            sample_count=1,
            deadline_ms=60_000,
            purpose=runner_pb2.GROUP_PURPOSE_EXTERNAL,
        )
        for name in names
    ]
    good = await world.give()  # handed out in the same answer
    for name in names:
        report = await world.report(name)
        assert (report.outcome, report.reason) == (runner_pb2.GROUP_OUTCOME_FAILED, "CONTEXT_TOO_LONG")
        assert report.detail == "a prompt of 1048576 characters does not fit 64 tokens"
    assert (await world.report(good)).outcome == runner_pb2.GROUP_OUTCOME_FINISHED


async def test_groups_of_other_environments_go_on_while_one_blocks(start_world: Any) -> None:
    world = await start_world("hangs", environment_timeout_s=600.0, environment_blocked_timeout_s=600.0)
    blocked = [await world.give("hangs") for _ in range(3)]
    for group_id in [await world.give() for _ in range(3)]:
        assert (await world.report(group_id)).outcome == runner_pb2.GROUP_OUTCOME_FINISHED
    assert not set(blocked) & set(world.orchestrator.reports)  # they never end


async def test_groups_of_other_environments_go_on_while_one_dies_again_and_again(start_world: Any) -> None:
    world = await start_world("dies")
    for _ in range(2):
        lost = await world.give("dies")
        good = await world.give()
        assert (await world.report(good)).outcome == runner_pb2.GROUP_OUTCOME_FINISHED
        report = await world.report(lost)
        assert (report.outcome, report.reason) == (runner_pb2.GROUP_OUTCOME_FAILED, "ENVIRONMENT_ERROR")


async def test_an_environment_that_cannot_be_imported_ends_the_runner(start_world: Any) -> None:
    world = await start_world(environments=[ImportedConfig(name="gone", path="no_such_module:Environment")])
    async with asyncio.timeout(100):
        with pytest.raises(ConfigError, match=r"environments\.gone: .*no_such_module"):
            await world.process
