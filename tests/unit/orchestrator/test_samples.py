"""Rollouts of several samples, from their records to what the trainer masks."""

from __future__ import annotations

import numpy as np

from slipstream.algorithms.advantages import Members, group_mean
from slipstream.algorithms.staleness import Group, SealedStep
from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.records import check_records
from slipstream.orchestrator.sealer import Sealer, record_rows
from slipstream.runner.envclient import ScoredSample, TurnPrompt
from slipstream.runner.episodes import Member
from slipstream.runner.records import Finished, Recorder, refs_of
from slipstream.runner.rollout import Segment
from slipstream.runner.spool import Rows
from slipstream.trainer.fetch import Part, ref_id
from slipstream.trainer.rows import RowForm, stitch

ASSIGNMENT = runner_pb2.GroupAssignment(
    group_id="train-0",
    attempt=1,
    environment="tools",
    sample_count=2,
    sampling=types_pb2.Sampling(max_new_tokens=10, temperature=1),
    dispatch_version=types_pb2.PolicyVersion(incarnation=1),
)
DENSE = RowForm((0, 0), np.dtype(np.uint8), 0, 100, PolicyVersion(1, 5))


def turn(member: Member, prompt: TurnPrompt, drawn: list[int], step: int) -> None:
    """A turn that the weights of a step sampled."""
    version = types_pb2.PolicyVersion(incarnation=1, step=step)
    span = types_pb2.VersionSpan(token_count=len(drawn), version=version, kv_oldest_version=version)
    logprobs = [-float(token_id) for token_id in drawn]
    segment = Segment(drawn, logprobs, [span], types_pb2.FINISH_REASON_STOP)
    member.take(prompt).take(segment, None, ASSIGNMENT.sampling)


def branching() -> Member:
    """Two turns, and one that leaves the conversation after the first."""
    member = Member(0)
    turn(member, TurnPrompt(0, 0, 0, [1, 2], "first", 10), [10, 11], step=3)
    turn(member, TurnPrompt(0, 0, 4, [3], "", 10), [12, 13, 14], step=4)
    turn(member, TurnPrompt(1, 0, 4, [4, 5], "branch", 10), [20, 21], step=5)
    return member


def straight() -> Member:
    member = Member(1)
    turn(member, TurnPrompt(0, 0, 0, [1, 2], "first", 10), [30], step=3)
    return member


def reported() -> tuple[list[runner_pb2.RolloutRecord], dict[str, Rows]]:
    rows: dict[str, Rows] = {}
    recorder = Recorder("here:1", "e")
    members = [(branching(), 1.0), (straight(), 0.0)]
    records = [
        recorder.record(ASSIGNMENT, Finished(m.index, m.samples, ScoredSample(reward, True, "", ""), ""), rows)
        for m, reward in members
    ]
    return records, rows


def test_every_sample_of_a_rollout_trains_on_what_was_drawn_for_it_with_its_advantage():
    records, rows = reported()
    check_records(ASSIGNMENT, runner_pb2.GroupReport(rollouts=records), PolicyVersion(1, 5))
    counted: list[int] = []

    def advantages(members: Members) -> list[float]:
        counted.extend(members.token_counts)
        return list(group_mean(members.rewards))

    sealer = Sealer(
        min_group_size=2,
        min_reward_std=1e-6,
        advantages=advantages,
        micro_batch_tokens=64,
        data_ranks=1,
    )
    group = sealer.judge(ASSIGNMENT, records)
    assert group is not None
    assert counted == [7, 1]
    sealed = SealedStep(6, (Group(0, "tools", attempt=1, dispatch_step=5),), 0, ())
    sealed_plan = sealer.plan(sealed, [group], incarnation=1)
    assert sealed_plan.rewards == {"tools": [1.0, 0.0]}
    (plan,) = sealed_plan.plans
    assert (plan.loss_token_count, plan.sequence_count) == (8, 3)
    planned = sorted(
        (each for batch in plan.micro_batches for each in batch.sequences),
        key=lambda each: (each.rollout_id, each.sample_number),
    )
    assert len({each.rollout_id for each in planned}) == 2
    parts = {
        ref_id(ref): Part(0, memoryview(rows[ref.key].data))
        for each in planned
        for ref in (each.token_ids, each.logprobs)
    }
    stitched = [stitch(each, parts, DENSE) for each in planned]
    assert [each.advantage for each in planned] == [0.5, 0.5, -0.5]
    trained = [s.token_ids[s.target_positions].tolist() for s in stitched if s is not None]
    assert trained == [[10, 11, 12, 13, 14], [20, 21], [30]]
    assert [s.engine_logps.tolist() for s in stitched if s is not None][1] == [-20.0, -21.0]
    assert stitched[1] is not None
    assert stitched[1].token_ids.tolist() == [1, 2, 10, 11, 4, 5, 20, 21]


def test_all_rows_of_a_rollout_are_given_back():
    records, rows = reported()
    keys, _ = refs_of(runner_pb2.GroupReport(rollouts=records))
    assert sorted(keys) == sorted(rows)
    assert sorted(ref.key for record in records for ref in record_rows(record)) == sorted(rows)
