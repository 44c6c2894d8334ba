"""Rollouts of several samples, from their records to what the trainer masks."""

from __future__ import annotations

import numpy as np

from slipstream.algorithms.advantages import Members, group_mean
from slipstream.algorithms.staleness import Group, SealedStep
from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.training.v1 import batch_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.records import check_records
from slipstream.orchestrator.sealer import SealedPlan, Sealer, record_rows
from slipstream.runner.envclient import RoleScore, ScoredSample, TurnPrompt
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


TWO = runner_pb2.GroupAssignment(
    group_id="train-1",
    attempt=1,
    environment="duel",
    sample_count=2,
    sampling=types_pb2.Sampling(max_new_tokens=10, temperature=1),
    dispatch_version=types_pb2.PolicyVersion(incarnation=1),
)


def duel(index: int, *, first: list[int], second: list[int]) -> Member:
    """Two roles that were shown the same, and speak in turn."""
    member = Member(index)
    turn(member, TurnPrompt(0, 0, 0, [1, 2], "first", 10, "white"), first, step=4)
    turn(member, TurnPrompt(1, 0, 0, [1, 2], "first", 10, "black"), second, step=4)
    turn(member, TurnPrompt(0, 0, len(first), [3], "", 10, "white"), [19], step=5)
    return member


def duels(rewards: list[tuple[float, float]], untrained: str = "") -> list[runner_pb2.RolloutRecord]:
    records = []
    for index, pair in enumerate(rewards):
        member = duel(index, first=[10 + index], second=[20 + index, 21])
        named = zip(("white", "black"), pair, strict=True)
        roles = tuple(RoleScore(role, reward, reward > 0, role == untrained) for role, reward in named)
        finished = Finished(index, member.samples, ScoredSample(sum(pair) / 2, False, "", "", roles), "")
        records.append(Recorder("here:1", "e").record(TWO, finished, {}))
    check_records(TWO, runner_pb2.GroupReport(rollouts=records), PolicyVersion(1, 5))
    return records


def role_sealer() -> Sealer:
    return Sealer(
        min_group_size=2,
        min_reward_std=1e-6,
        advantages=lambda members: group_mean(members.rewards),
        micro_batch_tokens=64,
        data_ranks=1,
    )


def planned(records: list[runner_pb2.RolloutRecord]) -> tuple[SealedPlan, list[batch_pb2.PlannedSequence]]:
    group = role_sealer().judge(TWO, records)
    assert group is not None
    sealed = SealedStep(6, (Group(0, "duel", attempt=1, dispatch_step=5),), 0, ())
    plan = role_sealer().plan(sealed, [group], incarnation=1)
    sequences = [each for batch in plan.plans[0].micro_batches for each in batch.sequences]
    return plan, sorted(sequences, key=lambda each: (each.rollout_id, each.sample_number))


def test_each_role_is_compared_with_itself_in_the_other_rollouts() -> None:
    plan, sequences = planned(duels([(1.0, -1.0), (0.0, -0.5)]))
    assert [(each.role, each.reward, each.advantage) for each in sequences] == [
        ("white", 1.0, 0.5),
        ("black", -1.0, -0.25),
        ("white", 0.0, -0.5),
        ("black", -0.5, 0.25),
    ]
    assert plan.rewards == {"duel": [0.0, -0.25]}
    assert plan.role_rewards == {"duel/white": [1.0, 0.0], "duel/black": [-1.0, -0.5]}
    assert plan.plans[0].loss_token_count == 2 * (2 + 2)


def test_a_role_whose_rewards_are_alike_has_no_advantage_and_a_group_of_such_roles_is_left_out() -> None:
    _, sequences = planned(duels([(1.0, 0.3), (0.0, 0.3)]))
    assert [each.advantage for each in sequences] == [0.5, 0.0, -0.5, 0.0]
    # The rewards of its rollouts do not differ, those of its roles do.
    assert role_sealer().judge(TWO, duels([(1.0, 0.0), (0.0, 1.0)])) is not None
    assert role_sealer().judge(TWO, duels([(1.0, 0.0), (1.0, 0.0)])) is None


def test_a_role_that_does_not_train_is_in_no_plan_and_its_rows_are_given_back() -> None:
    plan, sequences = planned(duels([(1.0, 0.0), (0.0, 1.0)], untrained="black"))
    assert [each.role for each in sequences] == ["white", "white"]
    assert plan.rewards == {"duel": [1.0, 0.0]}
    assert len(plan.rows) == 2 * 2 * 2
    assert plan.figures["token_lag_counts"] == {"0": 2, "1": 2}
    assert role_sealer().judge(TWO, duels([(1.0, 0.0), (1.0, 1.0)], untrained="black")) is None
