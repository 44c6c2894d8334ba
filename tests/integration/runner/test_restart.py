"""A runner that is started again has what its predecessor had, and so has one whose orchestrator is."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from slipstream.api.rollout.v1 import rows_pb2, runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.exits import ServiceFailed
from slipstream.environments.config import ImportedConfig
from slipstream.environments.tokenizer import TextCodec, build_tokenizer

CODEC = TextCodec(build_tokenizer())


async def test_a_report_whose_answer_never_came_is_repeated_and_its_rows_are_served_as_before(world: Any) -> None:
    world.orchestrator.takes_reports = False
    group_id = await world.give()
    await world.until(lambda: world.orchestrator.report_counts[group_id] > 0)
    report = world.orchestrator.reports.pop(group_id, None)
    assert report is None
    await world.restart()
    world.orchestrator.takes_reports = True
    report = await world.report(group_id)
    ref = report.rollouts[0].token_ids
    parts = {}
    for epoch in (ref.holder_epoch, "of another start"):
        asked = types_pb2.RowsRef(holder=world.address, key=ref.key, dtype="int32", holder_epoch=epoch)
        frames = [frame async for frame in world.rows.FetchRows(rows_pb2.FetchRowsRequest(refs=[asked]))]
        parts[epoch] = frames[0].header.parts[0]
    assert [part.missing for part in parts.values()] == [False, True]
    assert parts[ref.holder_epoch].size_bytes == 4 * report.rollouts[0].token_count


async def test_an_unfinished_group_goes_on_after_a_restart_under_names_of_its_own(world: Any) -> None:
    decode = world.workers["decode-1"]
    decode.gate.clear()
    group_id = await world.give()
    await world.until(lambda: bool(decode.decodes))
    before = len(world.orchestrator.heartbeats)
    await world.restart()
    await world.until(lambda: len(decode.decodes) > 1)
    epochs = [beat.runner_epoch for beat in world.orchestrator.heartbeats]
    first = world.orchestrator.heartbeats[epochs.index(epochs[-1])]
    assert len(world.orchestrator.heartbeats) > before
    assert [attempt.group_id for attempt in first.running] == [group_id]
    assert first.reported_to_epoch == ""
    await world.until(lambda: world.orchestrator.heartbeats[-1].reported_to_epoch == "first")
    decode.gate.set()
    assert (await world.report(group_id)).outcome == runner_pb2.GROUP_OUTCOME_FINISHED
    assert [list(request.sample_ids) for request in decode.decodes] == [
        ["g1.1.1.0", "g1.1.1.1"],
        ["g1.1.1.0~r1", "g1.1.1.1~r1"],
    ]


async def test_a_second_process_of_the_same_name_is_refused_before_it_touches_what_the_first_has(world: Any) -> None:
    await world.until_up()
    before = {path: path.read_bytes() for path in world.directory.rglob("*.epoch")}
    assert before
    with pytest.raises(ServiceFailed, match="another process is runner-1"):
        await world.run_another()
    assert {path: path.read_bytes() for path in world.directory.rglob("*.epoch")} == before
    assert (await world.report(await world.give())).outcome == runner_pb2.GROUP_OUTCOME_FINISHED


async def test_the_router_hears_once_of_each_start_of_a_runner_and_who_holds_what_it_places(world: Any) -> None:
    await world.report(await world.give())
    await world.until(lambda: len(world.router.began) == 1)
    await world.restart()
    await world.report(await world.give())
    await world.until(lambda: len(world.router.began) == 2)
    assert world.router.began == sorted(set(world.router.began))  # later starts compare greater
    placed = [(request.runner_id, request.runner_epoch) for request in world.router.asked]
    assert placed == world.router.began


async def test_a_group_that_another_has_by_now_is_not_taken_up(world: Any) -> None:
    decode = world.workers["decode-1"]
    decode.gate.clear()
    group_id = await world.give()
    await world.until(lambda: bool(decode.decodes))
    world.orchestrator.cancelled[group_id] = "SUPERSEDED"
    await world.restart()
    await world.until(lambda: ("acknowledged", "orchestrator", group_id) in world.events)
    decode.gate.set()
    other = await world.give()
    assert (await world.report(other)).outcome == runner_pb2.GROUP_OUTCOME_FINISHED
    assert group_id not in world.orchestrator.reports
    assert {request.request_id.partition("~")[0] for request in decode.decodes[1:]} == {f"{other}.1.1"}


async def test_a_restarted_orchestrator_hears_once_more_of_all_that_is_held(world: Any, tmp_path: Path) -> None:
    groups = [await world.give() for _ in range(3)]
    world.orchestrator.unneeded.add(groups[0])
    for group_id in groups:
        await world.report(group_id)
    world.orchestrator.refused.add(groups[1])
    world.orchestrator.epoch = "second"
    await world.until(lambda: world.orchestrator.heartbeats[-1].reported_to_epoch == "second")
    counts = [world.orchestrator.report_counts[group_id] for group_id in groups]
    assert min(counts[1:]) >= 2
    header, _ = await world.fetch(*(world.orchestrator.reports[g].rollouts[0].token_ids.key for g in groups))
    assert [part.missing for part in header.parts] == [True, True, False]
    spool = tmp_path / "spool" / "runner-1"
    await world.until(lambda: [path.suffix for path in spool.iterdir()] == [".rows"])


def turns(behaviour: str = "") -> ImportedConfig:
    return ImportedConfig(name="turns", path="small_episodes:CountingDown", options={"behaviour": behaviour})


async def said(world: Any, record: runner_pb2.RolloutRecord) -> str:
    _, data = await world.fetch(record.token_ids.key)
    return CODEC.decode_all(array("i", data).tolist())


@pytest.mark.parametrize(("asked", "ended", "again"), [("now 2", 1, 2 + 2), ("now 1", 3, 2)])
async def test_rollouts_go_on_at_the_turn_in_which_their_runner_died(
    start_world: Any, asked: str, ended: int, again: int
) -> None:
    """`asked`: in the turn that both rollouts are in then. `ended`: requests for turns before, the first one for both.
    `again`: those of the process that came after."""
    world = await start_world(environments=[turns()])
    decode = world.workers["decode-1"]
    decode.gate_words = asked
    decode.gate.clear()
    group_id = await world.give("turns", task_index=3, samples=2)
    await world.until(lambda: len(decode.decodes) == ended + 2)
    await world.restart()
    await world.until(lambda: len(decode.decodes) == ended + 4)
    decode.gate.set()
    report = await world.report(group_id)
    assert len(decode.decodes) == ended + 2 + again
    assert report.outcome == runner_pb2.GROUP_OUTCOME_FINISHED
    for index, record in enumerate(report.rollouts):
        assert await said(world, record) == "say 3\n3<|end|>\nnow 2\n2<|end|>\nnow 1\n1<|end|>"
        assert [(part.start, part.end) for part in record.loss_ranges] == [(6, 8), (15, 17), (24, 26)]
        assert sum(span.token_count for span in record.spans) == 6
        assert (record.reward, record.turn_count) == (1.0, 3)
        # The first turn's rows are where they were, under the name that its request had.
        assert [ref.key for ref in record.routes][:2] == ["p/g1.1.1", f"d/g1.1.1.{index}"]
        _, data = await world.fetch(record.logprobs.key)
        logprobs = array("f", data).tolist()
        assert [logprobs[at : at + 2] for at in (6, 15, 24)] == [[-0.5, -1.0]] * 3
    assert all("~r1" in request.request_id for request in decode.decodes[ended + 2 :])


async def test_an_environment_that_says_something_else_is_answered_anew_from_there(start_world: Any) -> None:
    world = await start_world(environments=[turns("never says the same twice")])
    decode = world.workers["decode-1"]
    decode.gate_from = 2
    decode.gate.clear()
    group_id = await world.give("turns", task_index=3, samples=1)
    await world.until(lambda: len(decode.decodes) == 3)
    await world.restart()
    decode.gate.set()
    report = await world.report(group_id)
    assert report.outcome == runner_pb2.GROUP_OUTCOME_FINISHED
    words = (await said(world, report.rollouts[0])).replace("<|end|>", "").split()
    told = [words[index + 1] for index, word in enumerate(words) if word == "in"]
    assert len(told) == 2
    assert len(set(told)) == 1  # both later turns are those of the second process
    assert len(decode.decodes) == 3 + 2
    assert report.rollouts[0].turn_count == 3


async def test_a_finished_answer_whose_judge_died_is_not_sampled_again(start_world: Any, tmp_path: Path) -> None:
    verdict = tmp_path / "verdict"
    options = {"behaviour": "waits", "file": str(verdict)}
    slow = ImportedConfig(name="slow", path="small_environment:Counting", options=options)
    world = await start_world(environments=[slow])
    decode = world.workers["decode-1"]
    group_id = await world.give("slow")
    spool = tmp_path / "spool" / "runner-1"
    await world.until(lambda: sum(file.read_bytes().count(b'"kind":"turn"') for file in spool.glob("*.turns")) == 2)
    await world.restart()
    verdict.touch()
    report = await world.report(group_id)
    assert (report.outcome, len(report.rollouts)) == (runner_pb2.GROUP_OUTCOME_FINISHED, 2)
    assert len(decode.decodes) == 1
