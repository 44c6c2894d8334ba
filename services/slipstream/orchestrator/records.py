"""What a report must keep beyond the rules of the proto, so that nobody further on has to doubt a record."""

from __future__ import annotations

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.common.errors import InvalidRequest
from slipstream.common.version import PolicyVersion
from slipstream.environments.base import MAX_REWARD
from slipstream.orchestrator.role_rewards import samples_of


def check_records(
    assignment: runner_pb2.GroupAssignment, report: runner_pb2.GroupReport, newest: PolicyVersion
) -> None:
    """Raise `InvalidRequest` unless every record fits its group and itself; nothing is beyond `newest`."""
    group_id, seen = assignment.group_id, set[int]()
    needed = assignment.needed_count or assignment.sample_count
    if len(report.rollouts) > needed:
        raise InvalidRequest(f"{group_id}: rollouts: {needed} are taken", field="rollouts", limit=needed)
    for index, record in enumerate(report.rollouts):
        try:
            _check_record(record, assignment.sample_count, newest)
            if record.sample_index in seen:
                raise InvalidRequest("this sample is listed already", field="sample_index")
        except InvalidRequest as error:
            field = f"rollouts[{index}].{error.metadata['field']}"
            raise InvalidRequest(
                f"{group_id}: {field}: {error.message}", **{**error.metadata, "field": field, "group_id": group_id}
            ) from None
        seen.add(record.sample_index)


def _check_record(record: runner_pb2.RolloutRecord, sample_count: int, newest: PolicyVersion) -> None:
    if record.sample_index >= sample_count:
        raise InvalidRequest(f"the group has {sample_count} samples", field="sample_index", limit=sample_count - 1)
    if abs(record.reward) > MAX_REWARD:
        raise InvalidRequest(f"a reward is within {MAX_REWARD:g} of 0", field="reward", limit=MAX_REWARD)
    _check_roles(record)
    _check_sample(record, newest)
    for number, sample in enumerate(record.further_samples):
        try:
            _check_sample(sample, newest)
        except InvalidRequest as error:
            field = f"further_samples[{number}].{error.metadata['field']}"
            raise InvalidRequest(error.message, **{**error.metadata, "field": field}) from None


def _check_roles(record: runner_pb2.RolloutRecord) -> None:
    """Each role has one reward and a sample, and each sample the role of a reward, or no role where there are none."""
    rewarded: set[str] = set()
    for each in record.role_rewards:
        if abs(each.reward) > MAX_REWARD:
            raise InvalidRequest(f"a reward is within {MAX_REWARD:g} of 0", field="role_rewards", limit=MAX_REWARD)
        if each.role in rewarded:
            raise InvalidRequest(f"role {each.role!r} is listed already", field="role_rewards")
        rewarded.add(each.role)
    sampled = {sample.role for sample in samples_of(record)}
    if sampled != (rewarded or {""}):
        raise InvalidRequest("its roles are those of its samples", field="role_rewards")


def _check_sample(record: runner_pb2.RolloutRecord | runner_pb2.RolloutSample, newest: PolicyVersion) -> None:
    count = record.token_count
    if record.prompt_token_count > count:
        raise InvalidRequest(f"the rollout has {count} tokens", field="prompt_token_count", limit=count)
    end = 0
    for part in record.loss_ranges:
        if not end <= part.start < part.end <= count:
            raise InvalidRequest(f"no ascending ranges within {count} tokens", field="loss_ranges", limit=count)
        end = part.end
    sampled, trained = sum(s.token_count for s in record.spans), sum(r.end - r.start for r in record.loss_ranges)
    if not trained <= sampled <= count:
        raise InvalidRequest(
            f"spans of {sampled} tokens for {trained} sampled ones of {count}", field="spans", limit=trained
        )
    versions = [version for span in record.spans for version in (span.version, span.kv_oldest_version)]
    if any(version.incarnation > newest.incarnation or version.step > newest.step for version in versions):
        raise InvalidRequest(f"no version is beyond {newest}", field="spans", limit=newest)
    for name, dtype in (("token_ids", "int32"), ("logprobs", "float32")):
        if getattr(record, name).dtype != dtype:
            raise InvalidRequest(f"they are {dtype}", field=f"{name}.dtype", limit=dtype)
    if record.HasField("teacher_logprobs") and record.teacher_logprobs.dtype != "float32":
        raise InvalidRequest("they are float32", field="teacher_logprobs.dtype", limit="float32")
