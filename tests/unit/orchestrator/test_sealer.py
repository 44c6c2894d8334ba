"""Advantages, the variance filter, and plans of references."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.algorithms.advantages import Advantages
from slipstream.algorithms.staleness import Group, SealedStep
from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.orchestrator.advantage import build_advantages
from slipstream.orchestrator.advantage_config import GroupNormalizedConfig
from slipstream.orchestrator.sealer import ScoredGroup, Sealer, within_bound

DEFAULT = build_advantages(GroupNormalizedConfig())


def sealer(
    micro_batch_tokens: int = 64,
    data_ranks: int = 1,
    min_reward_std: float = 1e-6,
    advantages: Advantages = DEFAULT,
) -> Sealer:
    return Sealer(
        min_group_size=2,
        min_reward_std=min_reward_std,
        advantages=advantages,
        micro_batch_tokens=micro_batch_tokens,
        data_ranks=data_ranks,
    )


def version(step: int) -> types_pb2.PolicyVersion:
    return types_pb2.PolicyVersion(incarnation=1, step=step)


def record(name: str, reward: float, tokens: int = 20, steps: tuple[int, ...] = (0,)) -> runner_pb2.RolloutRecord:
    per_span = 10 // len(steps)
    return runner_pb2.RolloutRecord(
        rollout_id=name,
        reward=reward,
        prompt_token_count=tokens - 10,
        token_count=tokens,
        loss_ranges=[types_pb2.RowRange(start=tokens - 10, end=tokens)],
        spans=[types_pb2.VersionSpan(token_count=per_span, version=version(step)) for step in steps],
        token_ids=types_pb2.RowsRef(holder="runner:1", key=f"{name}/tokens", dtype="int32"),
        logprobs=types_pb2.RowsRef(holder="runner:1", key=f"{name}/logprobs", dtype="float32"),
        routes=[types_pb2.RowsRef(holder="decode:1", key=f"{name}/routes", dtype="uint8")],
    )


def scored(position: int, rewards: list[float], **kwargs: object) -> ScoredGroup:
    assignment = runner_pb2.GroupAssignment(
        group_id=f"train-{position}", position=position, environment="words", dispatch_version=version(0)
    )
    records = [record(f"{position}.{i}", reward, **kwargs) for i, reward in enumerate(rewards)]  # type: ignore[arg-type]
    group = sealer().judge(assignment, records)
    assert group is not None
    return group


def sealed(positions: list[int], step: int = 1, oldest: int = 0) -> SealedStep:
    groups = tuple(Group(p, "words", attempt=1, dispatch_step=0) for p in positions)
    return SealedStep(step, groups, oldest, ())


def test_advantages_are_the_rewards_less_their_mean_over_their_spread() -> None:
    group = scored(0, [1.0, 0.0, 0.0, 1.0])
    assert group.advantages == pytest.approx([0.9998, -0.9998, -0.9998, 0.9998], abs=1e-5)


@pytest.mark.parametrize("reward", [0.0, 0.3, 1.0])
def test_a_group_whose_rewards_do_not_differ_is_filtered(reward: float) -> None:
    records = [record(str(i), reward) for i in range(8)]
    assert sealer().judge(runner_pb2.GroupAssignment(), records) is None


def test_without_a_least_spread_a_group_whose_rewards_do_not_differ_is_trained_with_no_advantage() -> None:
    group = sealer(min_reward_std=0.0).judge(runner_pb2.GroupAssignment(), [record(str(i), 0.3) for i in range(8)])
    assert group is not None
    assert group.advantages == [0.0] * 8


def test_a_plan_holds_every_sequence_once_within_the_micro_batch_budget() -> None:
    groups = [scored(position, [0.0, 1.0, 0.5]) for position in range(4)]
    plan = sealer(micro_batch_tokens=64).plan(sealed([0, 1, 2, 3]), groups, incarnation=1)
    (rank,) = plan.plans
    names = [sequence.rollout_id for batch in rank.micro_batches for sequence in batch.sequences]
    assert sorted(names) == sorted(f"{p}.{i}" for p in range(4) for i in range(3))
    assert all(sum(s.token_count for s in batch.sequences) <= 64 for batch in rank.micro_batches)
    assert (rank.token_count, rank.loss_token_count, rank.sequence_count) == (240, 120, 12)
    assert (rank.version.incarnation, rank.version.step, rank.last) == (1, 1, False)
    assert len(plan.rows) == 12 * 3
    assert plan.figures["lag_max"] == 0


def test_all_ranks_get_the_same_number_of_micro_batches() -> None:
    groups = [scored(position, [0.0, 1.0, 0.5]) for position in range(3)]
    step = replace(sealed([0, 1, 2], step=3), last=True)
    plan = sealer(micro_batch_tokens=40, data_ranks=4).plan(step, groups, incarnation=2)
    assert len(plan.plans) == 4
    assert len({len(rank.micro_batches) for rank in plan.plans}) == 1
    assert sum(len(batch.sequences) for rank in plan.plans for batch in rank.micro_batches) == 9
    assert {(rank.loss_token_count, rank.sequence_count) for rank in plan.plans} == {(90, 9)}
    assert all(rank.last for rank in plan.plans)


def test_tokens_of_a_masked_environment_beyond_the_bound_are_not_trained() -> None:
    group = scored(0, [0.0, 1.0], steps=(0, 3))
    masked = frozenset({"words"})
    plan = sealer().plan(sealed([0], step=5, oldest=2), [group], incarnation=1, masked=masked)
    sequences = [s for batch in plan.plans[0].micro_batches for s in batch.sequences]
    assert [(r.start, r.end) for s in sequences for r in s.loss_ranges] == [(15, 20), (15, 20)]
    assert (plan.plans[0].loss_token_count, plan.plans[0].sequence_count) == (10, 2)


def test_a_sequence_of_which_nothing_is_trained_counts_in_no_denominator() -> None:
    young, old = scored(0, [0.0, 1.0], steps=(3,)), scored(1, [0.0, 1.0], steps=(0,))
    masked = frozenset({"words"})
    plan = sealer().plan(sealed([0, 1], step=5, oldest=2), [young, old], incarnation=1, masked=masked)
    assert (plan.plans[0].loss_token_count, plan.plans[0].sequence_count) == (20, 2)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=6),
    st.data(),
)
def test_within_bound_keeps_exactly_the_tokens_that_are_young_enough(
    shape: list[tuple[int, int]], data: st.DataObject
) -> None:
    ranges, at = [], 0
    for gap, length in shape:
        ranges.append(types_pb2.RowRange(start=at + gap, end=at + gap + length))
        at += gap + length
    positions = [p for r in ranges for p in range(r.start, r.end)]
    steps = data.draw(st.lists(st.integers(0, 3), min_size=len(positions), max_size=len(positions)))
    spans = [types_pb2.VersionSpan(token_count=1, version=version(step)) for step in steps]
    kept = within_bound(ranges, spans, 2)
    expected = [position for position, step in zip(positions, steps, strict=True) if step >= 2]
    assert [p for r in kept for p in range(r.start, r.end)] == expected
