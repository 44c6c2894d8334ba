"""What a client makes of the records of rollouts."""

from __future__ import annotations

from slipstream.api.rollout.v1 import rollout_pb2, runner_pb2
from slipstream_client import Rollout


def test_a_sample_of_several_roles_says_what_it_is_worth_for_each():
    roles = [runner_pb2.RoleReward(role="white", reward=1.0), runner_pb2.RoleReward(role="black", reward=-1.0)]
    records = [runner_pb2.RolloutRecord(role_rewards=roles), runner_pb2.RolloutRecord(sample_index=1, reward=0.5)]
    samples = Rollout.from_proto(rollout_pb2.Rollout(records=records)).samples
    assert [sample.role_rewards for sample in samples] == [{"white": 1.0, "black": -1.0}, {}]
