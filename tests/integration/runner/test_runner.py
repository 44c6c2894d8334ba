"""Groups through a whole runner: reports, rows, retries, cancellation, what peers do to it."""

from __future__ import annotations

import asyncio
import base64
import struct
import zlib
from pathlib import Path
from typing import Any

import grpc
import pytest

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.compressed_lines import read_compressed
from slipstream.common.errors import EngineFull, KvTransferFailed, WorkerStale, from_rpc_error
from slipstream.common.runtime import ServiceFailed
from slipstream.environments.tokenizer import TextCodec, build_tokenizer

CODEC = TextCodec(build_tokenizer())
PROMPT = CODEC.encode("count to 7\n")
ANSWER = [*CODEC.encode("7"), CODEC.end_id]


async def test_a_group_runs_to_a_report_whose_rows_can_be_fetched(world: Any, tmp_path: Path) -> None:
    group_id = await world.give(samples=3)
    report = await world.report(group_id)
    assert report.outcome == runner_pb2.GROUP_OUTCOME_FINISHED
    assert [record.rollout_id for record in report.rollouts] == [f"g1.1.{index}" for index in range(3)]
    record = report.rollouts[0]
    assert (record.reward, record.correct, record.finish_reason) == (0.5, True, types_pb2.FINISH_REASON_STOP)
    assert (record.prompt_token_count, record.token_count) == (len(PROMPT), len(PROMPT) + 2)
    assert [(span.token_count, span.version.step) for span in record.spans] == [(2, 3)]
    assert [ref.key for ref in record.routes] == ["p/g1.1.1", "d/g1.1.1.0"]

    header, data = await world.fetch(record.token_ids.key, "t/unknown", record.logprobs.key)
    assert [part.missing for part in header.parts] == [False, True, False]
    assert (header.size_bytes, header.crc32) == (len(data), zlib.crc32(data))
    tokens = PROMPT + ANSWER
    assert data == struct.pack(f"<{len(tokens)}i{len(tokens)}f", *tokens, *[0.0] * len(PROMPT), -0.5, -1.0)

    assert world.workers["decode-1"].decodes[0].sampling.stop_token_ids == [CODEC.end_id]
    await world.until(lambda: world.router.released == ["place/g1.1.1"])
    path = tmp_path / "rollouts" / "runner-1.jsonl.zst"
    await world.until(path.exists)  # they are gathered for a while
    line = next(read_compressed(path))
    assert (line["prompt"], line["completion"], line["versions"]) == ("count to 7\n", "7", [[2, "1.3"]])
    assert (line["detail"], line["purpose"], line["turns"]) == ("7 was asked for", "training", 1)
    assert (line["token_ids"], line["loss_ranges"]) == (tokens, [[len(PROMPT), len(tokens)]])
    assert base64.b64decode(line["logprobs_base64"]) == struct.pack("<2f", -0.5, -1.0)
    assert line["timings"].keys() == {"queue_s", "prefill_s", "decode_s", "tools_s", "score_s", "total_s"}
    parts_s = sum(each for name, each in line["timings"].items() if name != "total_s")
    assert 0 < parts_s <= line["timings"]["total_s"] + 0.001
    assert "routes" not in line


async def test_a_row_stream_resumes_from_its_offset(world: Any) -> None:
    keys = [ref.key for ref in ((await world.report(await world.give())).rollouts[0].token_ids,)]
    header, data = await world.fetch(*keys)
    for offset in (1, len(data) - 1, len(data)):
        resumed_header, resumed = await world.fetch(*keys, offset=offset)
        assert (resumed_header, resumed) == (header, data[offset:])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await world.fetch(*keys, offset=len(data) + 1)
    assert from_rpc_error(caught.value).reason == "OFFSET_OUT_OF_RANGE"


@pytest.mark.parametrize("failed", ["prefill-1", "decode-1"])
async def test_a_turn_refused_by_a_stale_worker_is_placed_again_away_from_it(world: Any, failed: str) -> None:
    world.workers[failed].failure = WorkerStale("of another epoch")
    report = await world.report(await world.give())
    assert report.outcome == runner_pb2.GROUP_OUTCOME_FINISHED
    assert [list(request.avoid_replicas) for request in world.router.asked] == [[], [failed]]
    await world.until(lambda: world.router.released == ["place/g1.1.1", "place/g1.1.1~1"])


async def test_kv_that_did_not_arrive_is_the_prefill_workers_fault(world: Any) -> None:
    world.workers["decode-1"].failure = KvTransferFailed("it did not deliver")
    group_id = await world.give()
    await world.until(lambda: len(world.router.asked) > 1)
    assert list(world.router.asked[1].avoid_replicas) == ["prefill-1"]
    world.workers["decode-1"].failure = None
    assert (await world.report(group_id)).outcome == runner_pb2.GROUP_OUTCOME_FINISHED


async def test_a_placement_without_a_prefill_worker_leaves_the_prompt_to_decode(world: Any) -> None:
    world.router.pools["prefill"].clear()
    world.workers["decode-1"].failure = WorkerStale("of another epoch")
    report = await world.report(await world.give())
    record = report.rollouts[0]
    assert [ref.key for ref in record.routes] == ["d/g1.1.1~1", "d/g1.1.1.0~1"]
    assert (record.cached_token_count, record.prefix_query_token_count) == (2, len(PROMPT) - 1)
    assert [list(request.avoid_replicas) for request in world.router.asked] == [[], ["decode-1"]]
    assert not any(worker.prefills for worker in world.workers.values())
    assert [event for event in world.events if event[1].startswith("prefill")] == []


async def test_a_group_run_again_after_a_restore_has_rows_of_its_own(world: Any) -> None:
    """The same position, attempt and step, of the next incarnation: the dead one's rows are kept under other names."""
    dead = (await world.report(await world.give(task_index=7, samples=1))).rollouts[0]
    del world.orchestrator.reports["g1"]
    version = types_pb2.PolicyVersion(incarnation=2, step=3)
    again = (await world.report(await world.give(task_index=9, samples=1, group_id="g1", version=version))).rollouts[0]
    assert again.rollout_id == dead.rollout_id
    assert not {ref.key for ref in again.routes} & {ref.key for ref in dead.routes}
    for record, answer in ((dead, "7"), (again, "9")):
        _, data = await world.fetch(record.token_ids.key)
        tokens = list(struct.unpack(f"<{record.token_count}i", data))
        assert CODEC.decode(tokens[record.prompt_token_count : -1]) == answer
    assert [request.request_id for request in world.router.asked] == ["g1.1.1", "g1.2.1"]


async def test_a_broken_decode_stream_leaves_what_had_come_and_the_rest_is_sampled_under_new_ids(world: Any) -> None:
    world.workers["decode-1"].breaks_after_first_chunk = True
    report = await world.report(await world.give())
    assert [record.token_count for record in report.rollouts] == [len(PROMPT) + 2] * 2
    assert list(world.workers["decode-1"].decodes[0].sample_ids) == ["g1.1.1.0", "g1.1.1.1"]
    again = world.workers["decode-2"].decodes[0]
    assert (list(again.sample_ids), list(again.sample_indexes)) == (["g1.1.1.1~1"], [1])
    assert [record.rollout_id for record in report.rollouts] == ["g1.1.0", "g1.1.1"]
    assert [[ref.key for ref in record.routes] for record in report.rollouts] == [
        ["p/g1.1.1", "d/g1.1.1.0"],
        ["p/g1.1.1", "d/g1.1.1.1~1"],
    ]
    asked = [(record.cached_token_count, record.prefix_query_token_count) for record in report.rollouts]
    assert asked == [(4, len(PROMPT) - 1)] * 2
    assert ("aborted", "decode-1", "g1.1.1") in world.events
    assert ("aborted", "prefill-1", "g1.1.1") in world.events
    await world.until(lambda: len(world.router.released) == 2)
    assert world.workers["decode-1"].released_rows == []


async def test_a_group_that_no_worker_takes_fails_at_its_deadline(world: Any) -> None:
    for worker in world.workers.values():
        worker.failure = EngineFull("full", limit=1)
    world.orchestrator.waiting.append(
        runner_pb2.GroupAssignment(
            group_id="late",
            attempt=1,
            environment="good",
            split="train",
            sample_count=1,
            sampling=types_pb2.Sampling(max_new_tokens=4),
            salt="salt",
            deadline_ms=300,
        )
    )
    await world.orchestrator.tell()
    report = await world.report("late")
    assert (report.outcome, report.reason) == (runner_pb2.GROUP_OUTCOME_FAILED, "DEADLINE_EXCEEDED")


async def test_a_cancellation_is_acknowledged_after_both_workers_freed_the_blocks(world: Any) -> None:
    prefill, decode = world.workers["prefill-1"], world.workers["decode-1"]
    decode.gate.clear()
    prefill.abort_s, decode.abort_s = 0.4, 0.3
    group_id = await world.give()
    await world.until(lambda: bool(decode.decodes))
    world.orchestrator.cancelled[group_id] = "AGED_OUT"
    await world.orchestrator.tell()
    await world.until(lambda: group_id not in world.orchestrator.cancelled)
    *aborted, last = world.events
    assert sorted(aborted) == [("aborted", "decode-1", "g1.1.1"), ("aborted", "prefill-1", "g1.1.1")]
    assert last == ("acknowledged", "orchestrator", group_id)
    await world.until(lambda: prefill.released_rows == ["p/g1.1.1"])
    assert group_id not in world.orchestrator.reports


async def test_a_cancellation_of_an_unknown_group_is_acknowledged(world: Any) -> None:
    world.orchestrator.cancelled["unheard-of"] = "SUPERSEDED"
    await world.orchestrator.tell()
    await world.until(lambda: world.events == [("acknowledged", "orchestrator", "unheard-of")])


@pytest.mark.parametrize("answer", ["refused", "unneeded"])
async def test_rows_and_routes_of_a_group_nobody_trains_on_are_given_back(world: Any, answer: str) -> None:
    getattr(world.orchestrator, answer).add("g1")
    report = await world.report(await world.give(samples=1))
    # One call a holder, in any order.
    await world.until(lambda: world.workers["decode-1"].released_rows == ["d/g1.1.1.0"])
    await world.until(lambda: world.workers["prefill-1"].released_rows == ["p/g1.1.1"])
    header, data = await world.fetch(report.rollouts[0].token_ids.key, report.rollouts[0].logprobs.key)
    assert ([part.missing for part in header.parts], data) == ([True, True], b"")


async def test_an_orchestrator_that_is_away_for_a_second_costs_nothing(world: Any) -> None:
    decode = world.workers["decode-1"]
    decode.gate.clear()
    first = await world.give()
    await world.until(lambda: bool(decode.decodes))
    await world.stop_orchestrator()
    decode.gate.set()
    await asyncio.sleep(1)
    await world.start_orchestrator()
    second = await world.give()
    for group_id in (first, second):
        assert (await world.report(group_id)).outcome == runner_pb2.GROUP_OUTCOME_FINISHED
    assert len(decode.decodes) == 2


async def test_a_runner_asks_for_groups_again_as_it_asked_though_more_is_free_by_now(world: Any) -> None:
    """The orchestrator refuses another request under the same id; what it handed out under it must not be lost."""
    decode = world.workers["decode-1"]
    decode.gate.clear()
    group_id = await world.give()
    await world.until(lambda: bool(decode.decodes))
    orchestrator = world.orchestrator
    orchestrator.answers_acquires = False
    before = len(orchestrator.asked)
    await world.until(lambda: len(orchestrator.asked) > before + 1)
    decode.gate.set()
    await world.report(group_id)
    await world.until(lambda: len(orchestrator.asked) > before + 4)
    orchestrator.answers_acquires = True
    assert (await world.report(await world.give())).outcome == runner_pb2.GROUP_OUTCOME_FINISHED


async def test_a_superseded_runner_ends(world: Any) -> None:
    world.orchestrator.superseded = True
    await world.orchestrator.tell()
    async with asyncio.timeout(60):
        with pytest.raises(ServiceFailed, match="a later process runs"):
            await world.process


async def test_a_drain_reports_what_runs(start_world: Any) -> None:
    world = await start_world(drain_timeout_s=60.0)
    decode = world.workers["decode-1"]
    decode.gate.clear()
    group_id = await world.give()
    await world.until(lambda: bool(decode.decodes))
    world.ask_to_stop()
    await asyncio.sleep(0.3)
    assert not world.process.done()
    decode.gate.set()
    async with asyncio.timeout(60):
        await world.process
    assert world.orchestrator.reports[group_id].outcome == runner_pb2.GROUP_OUTCOME_FINISHED


@pytest.mark.parametrize("gone", ["stopping", "away"])
async def test_a_drain_waits_for_nothing_where_the_orchestrator_stops_too(start_world: Any, gone: str) -> None:
    world = await start_world(drain_timeout_s=600.0)
    decode = world.workers["decode-1"]
    decode.gate.clear()
    group_id = await world.give()
    await world.until(lambda: bool(decode.decodes))
    world.orchestrator.stops = gone == "stopping"
    if gone == "away":
        await world.stop_orchestrator()
    world.ask_to_stop()
    async with asyncio.timeout(80):
        await world.process
    assert group_id not in world.orchestrator.reports
    world.orchestrator.stops = False
    if gone == "away":
        await world.start_orchestrator()
    decode.gate.set()
    await world.restart()
    assert (await world.report(group_id)).outcome == runner_pb2.GROUP_OUTCOME_FINISHED
