from __future__ import annotations

import pytest

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.evaluation import MAX_ATTEMPTS, Evaluation, fields_of
from slipstream.orchestrator.evaluation_config import EvaluationConfig


def sample(correct: bool, *steps: int) -> runner_pb2.RolloutRecord:
    spans = [types_pb2.VersionSpan(token_count=2, version=PolicyVersion(1, step).to_proto()) for step in steps]
    return runner_pb2.RolloutRecord(correct=correct, reward=float(correct), spans=spans)


def taken(evaluation: Evaluation, slots: int, samples_per_slot: int = 8) -> int:
    count = 0
    while evaluation.may_take(slots, samples_per_slot):
        evaluation.take()
        count += 1
    return count


@pytest.mark.parametrize(
    ("samples", "share", "slots", "groups"),
    [(1, 0.25, 40, 10), (8, 0.25, 40, 10), (16, 0.25, 40, 5), (1, 0.25, 0, 1), (256, 0.01, 4, 1), (1, 1.0, 7, 7)],
)
def test_it_takes_its_share_of_groups_and_of_samples_and_one_in_any_case(samples, share, slots, groups):
    evaluation = Evaluation("e", {"words": 100}, 1, EvaluationConfig(samples=samples, share=share))
    assert taken(evaluation, slots) == evaluation.running == groups
    evaluation.answer("e-words-0", [sample(True, 1)] * samples)
    assert taken(evaluation, slots) == 1, "what ended makes room"
    evaluation.failed("e-words-1")
    assert evaluation.running == groups - 1


def test_versions_of_all_tokens_are_told():
    evaluation = Evaluation("step-3", {"words": 2}, 3)
    for _ in range(2):
        evaluation.take()
    evaluation.answer("step-3-words-0", [sample(True, 4)])
    evaluation.answer("step-3-words-1", [sample(False, 3, 5)])
    assert evaluation.done
    (result,) = evaluation.results()
    fields = fields_of(result)
    assert (fields["version_min"], fields["version_max"]) == ("1.3", "1.5")
    assert (fields["accuracy"], fields["tokens_mean"], fields["count"], fields["step"]) == (0.5, 3.0, 2, 3)


def test_roles_are_told_apart():
    evaluation = Evaluation("step-3", {"duel": 1}, 3)
    evaluation.take()
    record = sample(True, 3)
    record.role_rewards.add(role="white", reward=1.0, correct=True)
    record.role_rewards.add(role="black", reward=-1.0)
    evaluation.answer("step-3-duel-0", [record])
    (result,) = evaluation.results()
    fields = fields_of(result)
    assert fields["reward_by_role"] == {"white": 1.0, "black": -1.0}
    assert fields["accuracy_by_role"] == {"white": 1.0, "black": 0.0}


def test_a_task_that_fails_again_and_again_is_wrong_and_a_lost_runner_is_not_its_fault():
    evaluation = Evaluation("e", {"words": 1}, 0, EvaluationConfig(samples=2))
    for attempt in range(1, MAX_ATTEMPTS + 3):
        assert evaluation.take()[:2] == ("e-words-0", attempt)
        evaluation.failed("e-words-0", blameless=attempt <= 2)
        if attempt < MAX_ATTEMPTS:
            assert not evaluation.done
        if evaluation.done:
            break
    (result,) = evaluation.results()
    assert (result.accuracy, result.problem_count, result.unanswered) == (0.0, 1, 0)


def test_what_was_not_answered_is_counted_apart():
    evaluation = Evaluation("e", {"words": 3, "numbers": 1}, 0)
    evaluation.take()
    evaluation.answer("e-words-0", [sample(True, 0)])
    assert [(r.environment, r.problem_count, r.unanswered) for r in evaluation.results()] == [("words", 1, 2)]
