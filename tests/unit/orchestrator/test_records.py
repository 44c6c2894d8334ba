"""Reports that contradict themselves or their group are refused whole, whatever the contradiction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.errors import InvalidRequest
from slipstream.common.version import PolicyVersion
from slipstream.environments.base import MAX_REWARD
from slipstream.orchestrator.records import check_records

NEWEST = PolicyVersion(2, 100)
ASSIGNMENT = runner_pb2.GroupAssignment(group_id="train-0", attempt=1, sample_count=4)
wild = st.integers(-2, 12) | st.sampled_from([2**31 - 1, -(2**31)])
versions = st.builds(
    types_pb2.PolicyVersion,
    incarnation=st.integers(0, 3) | st.just(2**62),
    step=st.integers(0, 101) | st.just(2**62),
)
names, rewards = st.sampled_from(["white", "black"]), st.sampled_from([0.0, -1.0, 1e31])
records = st.builds(
    runner_pb2.RolloutRecord,
    sample_index=st.integers(0, 5),
    prompt_token_count=wild,
    token_count=wild,
    loss_ranges=st.lists(st.builds(types_pb2.RowRange, start=wild, end=wild), max_size=3),
    spans=st.lists(
        st.builds(types_pb2.VersionSpan, token_count=st.integers(1, 12), version=versions, kv_oldest_version=versions),
        max_size=3,
    ),
    token_ids=st.builds(types_pb2.RowsRef, dtype=st.sampled_from(["int32", "uint8"])),
    logprobs=st.builds(types_pb2.RowsRef, dtype=st.sampled_from(["float32", "int32"])),
    role=names | st.just(""),
    role_rewards=st.lists(st.builds(runner_pb2.RoleReward, role=names, reward=rewards), max_size=2),
)


def sound(*samples: int) -> runner_pb2.GroupReport:
    return runner_pb2.GroupReport(
        rollouts=[
            runner_pb2.RolloutRecord(
                sample_index=index,
                prompt_token_count=2,
                token_count=5,
                loss_ranges=[types_pb2.RowRange(start=2, end=5)],
                spans=[types_pb2.VersionSpan(token_count=3, version=types_pb2.PolicyVersion(incarnation=1, step=1))],
                token_ids=types_pb2.RowsRef(dtype="int32"),
                logprobs=types_pb2.RowsRef(dtype="float32"),
            )
            for index in samples
        ]
    )


def test_a_report_in_order_passes():
    check_records(ASSIGNMENT, sound(0, 3), NEWEST)


def test_no_more_members_are_taken_than_the_group_needs():
    spared = runner_pb2.GroupAssignment(group_id="train-0", attempt=1, sample_count=4, needed_count=2)
    check_records(spared, sound(0, 3), NEWEST)
    with pytest.raises(InvalidRequest) as refused:
        check_records(spared, sound(0, 1, 3), NEWEST)
    assert refused.value.metadata == {"field": "rollouts", "limit": "2"}


@pytest.mark.parametrize("reward", [1e308, -1e200])
def test_a_reward_whose_square_is_not_finite_is_refused(reward: float):
    report = sound(0, 1)
    report.rollouts[1].reward = reward
    with pytest.raises(InvalidRequest, match="a reward is within"):
        check_records(ASSIGNMENT, report, NEWEST)


def test_a_sample_counts_once_and_belongs_to_the_group():
    for samples in [(1, 1), (4,)]:
        with pytest.raises(InvalidRequest, match="sample_index"):
            check_records(ASSIGNMENT, sound(*samples), NEWEST)


@given(st.lists(records, max_size=3))
def test_what_passes_can_be_trained_on_as_it_is(rollouts):
    try:
        check_records(ASSIGNMENT, runner_pb2.GroupReport(rollouts=rollouts), NEWEST)
    except InvalidRequest:
        return
    for record in rollouts:
        positions = [at for part in record.loss_ranges for at in range(part.start, part.end)]
        assert positions == sorted(set(positions))
        assert all(0 <= at < record.token_count for at in positions)
        spans = [span for span in record.spans for _ in range(span.token_count)]
        assert len(positions) <= len(spans) <= record.token_count
        for span in record.spans:
            for version in (span.version, span.kv_oldest_version):
                assert version.incarnation <= NEWEST.incarnation
                assert version.step <= NEWEST.step
        assert [each.role for each in record.role_rewards] == [record.role] * bool(record.role)
        assert all(abs(each.reward) <= MAX_REWARD for each in record.role_rewards)
    assert len({record.sample_index for record in rollouts}) == len(rollouts)


def of_roles(
    *rewarded: str, role: str = "white", further: str = "black", reward: float = 1.0
) -> runner_pb2.GroupReport:
    report = sound(0)
    (record,) = report.rollouts
    record.role = role
    record.role_rewards.extend(runner_pb2.RoleReward(role=name, reward=reward) for name in rewarded)
    record.further_samples.add(
        role=further, prompt_token_count=1, token_count=1, token_ids=record.token_ids, logprobs=record.logprobs
    )
    return report


def test_each_sample_is_of_a_role_that_has_a_reward_and_each_of_those_has_a_sample():
    check_records(ASSIGNMENT, of_roles("white", "black"), NEWEST)
    check_records(ASSIGNMENT, of_roles("white", further="white"), NEWEST)
    for wrong in (
        of_roles("white"),
        of_roles("white", "black", "red"),
        of_roles("white", further=""),
        of_roles("white", "white", "black"),
        of_roles("white", "black", reward=1e31),
        of_roles(),
    ):
        with pytest.raises(InvalidRequest) as refused:
            check_records(ASSIGNMENT, wrong, NEWEST)
        assert refused.value.metadata["field"] == "rollouts[0].role_rewards"
