"""Groups whose environment takes turns, in a real environment worker."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.common.compressed_lines import read_compressed
from slipstream.environments.config import ImportedConfig
from slipstream.environments.tokenizer import TextCodec, build_tokenizer

CODEC = TextCodec(build_tokenizer())

FINISHED = runner_pb2.GROUP_OUTCOME_FINISHED


def turns(behaviour: str = "", *, folder: Path | None = None, **fields: Any) -> ImportedConfig:
    options = {"behaviour": behaviour, **({"folder": str(folder)} if folder else {})}
    return ImportedConfig(name="turns", path="small_episodes:CountingDown", options=options, **fields)


async def ids_of(world: Any, key: str) -> list[int]:
    _, data = await world.fetch(key)
    return array("i", data).tolist()


async def test_each_turn_goes_on_from_the_tokens_of_the_one_before(start_world: Any, tmp_path: Path) -> None:
    world = await start_world(environments=[turns()])
    report = await world.report(await world.give("turns", task_index=3, samples=2))
    assert (report.outcome, [record.reward for record in report.rollouts]) == (FINISHED, [1.0, 1.0])
    record = report.rollouts[0]
    said = "say 3\n3<|end|>\nnow 2\n2<|end|>\nnow 1\n1<|end|>"
    end = CODEC.end_id
    parts = [CODEC.encode("say 3\n3"), CODEC.encode("\nnow 2\n2"), CODEC.encode("\nnow 1\n1")]
    expected = [token for part in parts for token in (*part, end)]
    assert await ids_of(world, record.token_ids.key) == expected
    assert CODEC.decode_all(expected) == said
    # What the environment says is not trained: two tokens a turn are.
    ends = [6, 6 + 9, 6 + 18]
    assert [(part.start, part.end) for part in record.loss_ranges] == [(at, at + 2) for at in ends]
    assert sum(span.token_count for span in record.spans) == 6
    assert (record.prompt_token_count, record.token_count, record.turn_count) == (6, 26, 3)
    # The first turn is one request for both; each goes on by itself.
    decodes = [request for worker in world.workers.values() for request in worker.decodes]
    assert sorted(len(request.sample_ids) for request in decodes) == [1, 1, 1, 1, 2]
    path = tmp_path / "rollouts" / "runner-1.jsonl.zst"
    await world.until(path.exists)  # they are gathered for a while
    line = next(read_compressed(path))
    assert (line["turns"], line["completion"], line["detail"]) == (3, "1", "3 right")
    assert [message["content"] for message in line["conversations"][0]] == ["say 3", "3", "now 2", "2", "now 1", "1"]


@pytest.mark.parametrize(
    ("behaviour", "detail"),
    [
        ("raises at setup", "LookupError: no room"),
        ("raises at a step", "ZeroDivisionError: a bug of its own"),
        ("raises at the score", "KeyError: 'lost'"),
        ("raises what cannot be shown", "Unsayable: its text raises RecursionError"),
        ("exits at a step", "SystemExit: 3"),
        ("cancels at a step", "CancelledError: "),
        ("says what is no JSON", "TypeError: Object of type UUID is not JSON serializable"),
        ("hangs", "TimeoutError: a step took longer than 5 s"),
    ],
)
async def test_an_episode_that_fails_ends_alone(start_world: Any, behaviour: str, detail: str) -> None:
    world = await start_world(environments=[turns(behaviour, step_timeout_s=5.0 if behaviour == "hangs" else 30.0)])
    report = await world.report(await world.give("turns", task_index=2, samples=3))
    assert report.outcome == FINISHED
    assert [record.sample_index for record in report.rollouts] == [0, 2]
    assert [(f.sample_index, f.reason, f.detail) for f in report.failures] == [(1, "ENVIRONMENT_ERROR", detail)]


async def test_a_group_one_of_whose_episodes_finds_its_sandbox_away_is_to_be_run_again(start_world: Any) -> None:
    world = await start_world(environments=[turns("finds no sandbox")])
    report = await world.report(await world.give("turns", task_index=2, samples=3))
    assert (report.outcome, report.reason) == (runner_pb2.GROUP_OUTCOME_FAILED, "SANDBOX_AWAY")
    assert not report.rollouts


def begun(why: str) -> float:
    """Samples that were begun so far, as whoever scrapes is told."""
    labels = {"environment": "turns", "why": why}
    return REGISTRY.get_sample_value("slipstream_runner_samples_begun_total", labels) or 0.0


async def test_a_context_begins_another_sample_of_the_same_rollout(start_world: Any) -> None:
    before = {why: begun(why) for why in ("first", "history")}
    world = await start_world(environments=[turns("compacts")])
    (record,) = (await world.report(await world.give("turns", task_index=3, samples=1))).rollouts
    (further,) = record.further_samples
    assert await ids_of(world, further.token_ids.key) == [*CODEC.encode("now 1\n1"), CODEC.end_id]
    assert (further.prompt_token_count, further.token_count) == (6, 8)
    assert [(part.start, part.end) for part in further.loss_ranges] == [(6, 8)]
    assert len(record.loss_ranges) == 2
    assert record.reward == 1.0
    assert {why: begun(why) - count for why, count in before.items()} == {"first": 1, "history": 1}


async def test_an_episode_ends_at_its_last_turn(start_world: Any) -> None:
    world = await start_world(environments=[turns(max_turns=2)])
    (record,) = (await world.report(await world.give("turns", task_index=3, samples=1))).rollouts
    assert (record.turn_count, round(record.reward, 2)) == (2, 0.67)
    assert record.cut == runner_pb2.ROLLOUT_CUT_TURNS
    path = world.directory / "rollouts" / "runner-1.jsonl.zst"
    await world.until(path.exists)
    assert next(read_compressed(path))["cut"] == "turns"


async def test_an_episode_ends_at_its_last_token(start_world: Any) -> None:
    world = await start_world(environments=[turns(max_rollout_tokens=4)])
    (record,) = (await world.report(await world.give("turns", task_index=3, samples=1))).rollouts
    assert record.cut == runner_pb2.ROLLOUT_CUT_TOKENS
    # Each turn takes two of them, and no more are asked for than are left.
    assert (record.turn_count, round(record.reward, 2)) == (2, 0.67)
    decodes = [request for worker in world.workers.values() for request in worker.decodes]
    assert sorted(request.sampling.max_new_tokens for request in decodes) == [2, 4]


async def test_rollouts_that_take_too_long_end_with_their_reason(start_world: Any) -> None:
    world = await start_world(environments=[turns(rollout_timeout_s=0.5)])
    for worker in world.workers.values():
        worker.gate.clear()
    report = await world.report(await world.give("turns", task_index=3, samples=2))
    assert (report.outcome, report.reason) == (runner_pb2.GROUP_OUTCOME_FAILED, "ROLLOUT_TIMEOUT")
    assert [failure.sample_index for failure in report.failures] == [0, 1]


async def test_tools_answer_calls_and_the_model_is_told_of_malformed_ones(start_world: Any, tmp_path: Path) -> None:
    world = await start_world(environments=[turns("has a tool")])
    (record,) = (await world.report(await world.give("turns", task_index=1, samples=1))).rollouts
    assert (record.reward, record.turn_count) == (1.0, 4)
    assert not record.further_samples
    path = tmp_path / "rollouts" / "runner-1.jsonl.zst"
    await world.until(path.exists)
    (messages,) = next(read_compressed(path))["conversations"]
    assert [message["role"] for message in messages] == [
        *("user", "assistant", "tool"),
        *("assistant", "user", "assistant", "tool"),
        "assistant",
    ]
    assert messages[2]["content"] == "error: this tool call is no JSON: {look}"
    assert messages[5]["tool_calls"][0]["function"] == {"name": "look", "arguments": {}}
    assert messages[6] == {"role": "tool", "content": "saw 1", "tool_call_id": messages[5]["tool_calls"][0]["id"]}


async def test_episodes_that_nobody_waits_for_any_more_are_closed(start_world: Any, tmp_path: Path) -> None:
    world = await start_world(environments=[turns("waits at setup", folder=tmp_path)])
    group_id = await world.give("turns", task_index=2, samples=3)
    await world.until((tmp_path / "asked").exists)
    world.orchestrator.cancelled[group_id] = "AGED_OUT"
    await world.orchestrator.tell()
    await world.until(lambda: ("acknowledged", "orchestrator", group_id) in world.events)
    (tmp_path / "go").touch()
    closed = tmp_path / "closed"
    await world.until(lambda: closed.exists() and closed.read_text() == "xxx")


async def test_episodes_are_closed_when_the_runner_ends(start_world: Any, tmp_path: Path) -> None:
    world = await start_world(environments=[turns(folder=tmp_path)])
    for worker in world.workers.values():
        worker.gate.clear()
    await world.give("turns", task_index=2, samples=3)
    await world.until(lambda: any(worker.decodes for worker in world.workers.values()))
    await world.stop()
    assert (tmp_path / "closed").read_text() == "xxx"
