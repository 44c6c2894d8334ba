"""Groups whose environment has several roles, in a real environment worker."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.common.compressed_lines import read_compressed
from slipstream.environments.config import ImportedConfig
from slipstream.environments.tokenizer import TextCodec, build_tokenizer

CODEC = TextCodec(build_tokenizer())


def duel(behaviour: str = "", **fields: Any) -> ImportedConfig:
    options = {"behaviour": behaviour}
    return ImportedConfig(name="duel", path="small_roles:CountingTogether", options=options, **fields)


async def told(world: Any, sample: runner_pb2.RolloutRecord | runner_pb2.RolloutSample) -> str:
    _, data = await world.fetch(sample.token_ids.key)
    return CODEC.decode_all(array("i", data).tolist())


async def check_game(world: Any, record: runner_pb2.RolloutRecord) -> None:
    """From 4: `even` says 4 and 2, `odd` says 3 and 1, each in a conversation of its own."""
    (odd,) = record.further_samples
    assert (record.role, odd.role) == ("even", "odd")
    assert await told(world, record) == "say 4\n4<|end|>\nsay 2\n2<|end|>"
    assert await told(world, odd) == "say 3\n3<|end|>\nsay 1\n1<|end|>"
    for sample in (record, odd):  # what the environment says is not trained: two tokens a turn are
        assert [(part.start, part.end) for part in sample.loss_ranges] == [(6, 8), (15, 17)]
        assert sum(span.token_count for span in sample.spans) == 4
        _, data = await world.fetch(sample.logprobs.key)
        logprobs = array("f", data).tolist()
        assert [logprobs[at : at + 2] for at in (6, 15)] == [[-0.5, -1.0]] * 2


async def test_each_role_has_a_conversation_a_sample_and_a_reward(start_world: Any, tmp_path: Path) -> None:
    world = await start_world(environments=[duel(trained_roles=["even"])])
    report = await world.report(await world.give("duel", task_index=4, samples=2))
    assert report.outcome == runner_pb2.GROUP_OUTCOME_FINISHED
    for record in report.rollouts:
        await check_game(world, record)
        assert [(each.role, each.reward, each.untrained) for each in record.role_rewards] == [
            ("even", 2.0, False),
            ("odd", 2.0, True),
        ]
        assert (record.reward, record.correct, record.turn_count) == (2.0, True, 4)
    path = tmp_path / "rollouts" / "runner-1.jsonl.zst"
    await world.until(path.exists)  # they are gathered for a while
    line = next(read_compressed(path))
    assert [(each["role"], each["reward"], each["correct"]) for each in line["roles"]] == [
        ("even", 2.0, True),
        ("odd", 2.0, True),
    ]
    assert (line["role"], line["further_samples"][0]["role"]) == ("even", "odd")
    assert [len(messages) for messages in line["conversations"]] == [4, 4]
    assert "odd: said ['3', '1']" in line["detail"]


async def test_a_role_that_had_no_turn_has_no_reward(start_world: Any) -> None:
    world = await start_world(environments=[duel()])
    (record,) = (await world.report(await world.give("duel", task_index=1, samples=1))).rollouts
    assert [(each.role, each.reward) for each in record.role_rewards] == [("odd", 1.0)]
    assert (record.role, record.reward, len(record.further_samples)) == ("odd", 1.0, 0)


async def test_a_role_whose_context_is_begun_anew_has_several_samples(start_world: Any) -> None:
    world = await start_world(environments=[duel("forgets")])
    (record,) = (await world.report(await world.give("duel", task_index=3, samples=1))).rollouts
    samples = [record, *record.further_samples]
    assert [(each.role, await told(world, each)) for each in samples] == [
        ("odd", "say 3\n3<|end|>"),
        ("even", "say 2\n2<|end|>"),
        ("odd", "say 1\n1<|end|>"),
    ]
    assert [(each.role, each.reward) for each in record.role_rewards] == [("even", 1.0), ("odd", 2.0)]
    assert record.reward == 1.5


@pytest.mark.parametrize(
    ("behaviour", "detail"),
    [
        ("asks a stranger", "the environment has no role 'nowhere'; its roles: even, odd, nobody"),
        ("asks for nothing", "a turn of 'odd' has no messages"),
        ("has one score", "score of 'duel' must return a RoleScores, got Score"),
        ("lacks a score", "score of 'duel': it has none for 'odd', which took a turn"),
    ],
)
async def test_a_game_that_names_roles_wrongly_fails_with_the_reason(
    start_world: Any, behaviour: str, detail: str
) -> None:
    world = await start_world(environments=[duel(behaviour)])
    report = await world.report(await world.give("duel", task_index=4, samples=1))
    assert (report.outcome, report.reason) == (runner_pb2.GROUP_OUTCOME_FAILED, "ENVIRONMENT_ERROR")
    assert detail in report.detail


@pytest.mark.parametrize(("asked", "ended", "again"), [("say 3", 1, 2 + 2 + 2), ("say 1", 5, 2)])
async def test_games_go_on_at_the_turn_of_the_role_in_which_their_runner_died(
    start_world: Any, asked: str, ended: int, again: int
) -> None:
    """`asked`: in the turn that both games are in then. `ended`: requests for turns before, the first one for both.
    `again`: those of the process that came after."""
    world = await start_world(environments=[duel()])
    decode = world.workers["decode-1"]
    decode.gate_words = asked
    decode.gate.clear()
    group_id = await world.give("duel", task_index=4, samples=2)
    await world.until(lambda: len(decode.decodes) == ended + 2)
    await world.restart()
    await world.until(lambda: len(decode.decodes) == ended + 4)
    decode.gate.set()
    report = await world.report(group_id)
    assert report.outcome == runner_pb2.GROUP_OUTCOME_FINISHED
    assert len(decode.decodes) == ended + 2 + again
    for record in report.rollouts:
        await check_game(world, record)
        assert [(each.role, each.reward) for each in record.role_rewards] == [("even", 2.0), ("odd", 2.0)]
    assert all("~r1" in request.request_id for request in decode.decodes[ended + 2 :])
