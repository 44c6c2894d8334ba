"""From scored groups to the plan of a step: who teaches anything, with which advantage, in which micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slipstream.algorithms.advantages import Advantages, Members
from slipstream.algorithms.packing import pack
from slipstream.algorithms.role_advantages import by_role, variance
from slipstream.algorithms.staleness import SealedStep
from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.training.v1 import batch_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.orchestrator.role_rewards import results_of, reward_of, samples_of, trained_samples


@dataclass(slots=True)
class ScoredGroup:
    """A group that is ready to be trained: its rollouts' records, and what each is worth beside the others."""

    assignment: runner_pb2.GroupAssignment
    records: list[runner_pb2.RolloutRecord]
    advantages: list[float]
    """One for each rollout; none where roles have their own."""
    role_advantages: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    """By role, for each rollout, where the environment has roles."""

    def advantage_of(self, index: int, role: str) -> float:
        """Of the samples of one role of a rollout."""
        return self.role_advantages[index][role] if self.role_advantages else self.advantages[index]


@dataclass(slots=True)
class SealedPlan:
    """The plans of a step, one a data rank, and the figures of its step record."""

    step: int
    plans: list[batch_pb2.Plan]
    figures: dict[str, object]
    rows: list[types_pb2.RowsRef]
    """What may be dropped once the step is trained."""
    attempts: frozenset[tuple[str, int]]
    """(group_id, attempt) of all groups in it."""

    @property
    def rewards(self) -> dict[str, list[float]]:
        """Of the rollouts it trains on, by environment; with roles the mean over them."""
        found: dict[str, list[float]] = {}
        for environment, roles in self._role_rewards.values():
            found.setdefault(environment, []).append(sum(roles.values()) / len(roles))
        return found

    @property
    def role_rewards(self) -> dict[str, list[float]]:
        """The same by `environment/role`, where there are roles."""
        found: dict[str, list[float]] = {}
        for environment, roles in self._role_rewards.values():
            for role, reward in roles.items():
                if role:
                    found.setdefault(f"{environment}/{role}", []).append(reward)
        return found

    @property
    def _role_rewards(self) -> dict[str, tuple[str, dict[str, float]]]:
        """Environment, and rewards by role, of each rollout: its samples of one role have one reward."""
        found: dict[str, tuple[str, dict[str, float]]] = {}
        for plan in self.plans:
            for batch in plan.micro_batches:
                for sequence in batch.sequences:
                    _, roles = found.setdefault(sequence.rollout_id, (sequence.environment, {}))
                    roles[sequence.role] = sequence.reward
        return found


class Sealer:
    """Judges groups and composes plans. No state."""

    def __init__(
        self,
        *,
        min_group_size: int,
        min_reward_std: float,
        advantages: Advantages,
        micro_batch_tokens: int,
        data_ranks: int,
    ) -> None:
        self.min_group_size = min_group_size
        self.min_reward_std = min_reward_std
        self.advantages = advantages
        self.micro_batch_tokens = micro_batch_tokens
        self.data_ranks = data_ranks

    def judge(
        self, assignment: runner_pb2.GroupAssignment, records: Sequence[runner_pb2.RolloutRecord]
    ) -> ScoredGroup | None:
        """Return the group with its advantages, or None when its rewards do not differ (DAPO's dynamic sampling).

        With roles, None when those of no role that trains differ. Where all members come with an advantage, those are
        taken as they are. Raises `BadAdvantages`.
        """
        if has_advantages(records):
            return ScoredGroup(assignment, list(records), [record.advantage for record in records])
        rewards = [record.reward for record in records]
        if any(record.role_rewards for record in records):
            roles = by_role(self.advantages, [results_of(record) for record in records], self.min_reward_std)
            return None if roles is None else ScoredGroup(assignment, list(records), [], roles)
        if variance(rewards) < self.min_reward_std**2:
            return None
        members = Members(rewards, [sampled_token_count(record) for record in records])
        return ScoredGroup(assignment, list(records), list(self.advantages(members)))

    def plan(
        self, sealed: SealedStep, groups: Sequence[ScoredGroup], incarnation: int, masked: frozenset[str] = frozenset()
    ) -> SealedPlan:
        """Compose the plans of a step. Tokens of `masked` environments below `sealed.oldest_step` are not trained."""
        bounds = dict.fromkeys(masked, sealed.oldest_step)
        sequences = [
            # The position's environment, since that is what let the group grow so old, whatever its members are.
            self._sequence(
                group,
                record,
                number,
                group.advantage_of(index, sample.role),
                bounds.get(position.environment, 0),
            )
            for position, group in zip(sealed.groups, groups, strict=True)
            for index, record in enumerate(group.records)
            for number, sample in trained_samples(record)
        ]
        version = types_pb2.PolicyVersion(incarnation=incarnation, step=sealed.step)
        counts = [loss_token_count(sequence.loss_ranges) for sequence in sequences]
        loss_tokens = sum(counts)
        tokens = sum(sequence.token_count for sequence in sequences)
        ranks = pack([sequence.token_count for sequence in sequences], self.micro_batch_tokens, self.data_ranks)
        plans = [
            batch_pb2.Plan(
                version=version,
                micro_batches=[
                    batch_pb2.MicroBatch(sequences=[sequences[index] for index in indexes]) for indexes in micro_batches
                ],
                loss_token_count=loss_tokens,
                sequence_count=sum(count > 0 for count in counts),
                token_count=tokens,
                last=sealed.last,
            )
            for micro_batches in ranks
        ]
        rows = [ref for group in groups for record in group.records for ref in record_rows(record)]
        attempts = frozenset((group.assignment.group_id, group.assignment.attempt) for group in groups)
        return SealedPlan(sealed.step, plans, _figures(sealed, groups, tokens, loss_tokens), rows, attempts)

    def _sequence(
        self, group: ScoredGroup, record: runner_pb2.RolloutRecord, number: int, advantage: float, oldest_step: int
    ) -> batch_pb2.PlannedSequence:
        """One of a rollout's samples: all of a role have its advantage."""
        sample = samples_of(record)[number]
        ranges = sample.loss_ranges
        return batch_pb2.PlannedSequence(
            rollout_id=record.rollout_id,
            group_id=group.assignment.group_id,
            environment=group.assignment.environment,
            advantage=advantage,
            reward=reward_of(record, sample.role),
            role=sample.role,
            token_count=sample.token_count,
            loss_ranges=within_bound(ranges, sample.spans, oldest_step) if oldest_step else ranges,
            spans=sample.spans,
            dispatch_version=group.assignment.dispatch_version,
            token_ids=sample.token_ids,
            logprobs=sample.logprobs,
            routes=sample.routes,
            temperature=group.assignment.sampling.temperature,
            sample_number=number,
            **({"teacher_logprobs": sample.teacher_logprobs} if sample.HasField("teacher_logprobs") else {}),
        )


def has_advantages(records: Sequence[runner_pb2.RolloutRecord]) -> bool:
    """Whether whoever closed these sessions said what each is worth."""
    return bool(records) and all(record.HasField("advantage") for record in records)


def loss_token_count(ranges: Iterable[types_pb2.RowRange]) -> int:
    """Positions that the ranges cover."""
    return sum(covered.end - covered.start for covered in ranges)


def sampled_token_count(record: runner_pb2.RolloutRecord) -> int:
    """Tokens the model drew in a rollout."""
    return sum(loss_token_count(sample.loss_ranges) for sample in samples_of(record))


def record_rows(record: runner_pb2.RolloutRecord) -> list[types_pb2.RowsRef]:
    """Return every reference of a rollout."""
    return [ref for each in samples_of(record) for ref in references(each)]


def references(
    each: runner_pb2.RolloutRecord | runner_pb2.RolloutSample | batch_pb2.PlannedSequence,
) -> list[types_pb2.RowsRef]:
    """Return those of one sample."""
    teacher = [each.teacher_logprobs] if each.HasField("teacher_logprobs") else []
    return [each.token_ids, each.logprobs, *teacher, *each.routes]


def within_bound(
    ranges: Iterable[types_pb2.RowRange], spans: Iterable[types_pb2.VersionSpan], oldest_step: int
) -> list[types_pb2.RowRange]:
    """Keep the positions of `ranges` whose token was sampled by step `oldest_step` or later.

    `spans` count sampled tokens in order of position; `ranges` say at which positions those are.
    """
    steps = [(span.version.step, span.token_count) for span in spans]
    kept: list[types_pb2.RowRange] = []
    index = used = 0
    for whole in ranges:
        start = whole.start
        while start < whole.end and index < len(steps):
            step, count = steps[index]
            taken = min(whole.end - start, count - used)
            if step >= oldest_step:
                if kept and kept[-1].end == start:
                    kept[-1].end = start + taken
                else:
                    kept.append(types_pb2.RowRange(start=start, end=start + taken))
            start += taken
            used += taken
            if used == count:
                index, used = index + 1, 0
    return kept


def _figures(sealed: SealedStep, groups: Sequence[ScoredGroup], tokens: int, loss_tokens: int) -> dict[str, object]:
    lags = [group.lag(sealed.step) for group in sealed.groups]
    token_lags: Counter[int] = Counter()
    for group in groups:
        for sample in (sample for record in group.records for _, sample in trained_samples(record)):
            for span in sample.spans:
                token_lags[sealed.step - 1 - span.version.step] += span.token_count
    return {
        "groups_trained": len(groups),
        "groups_by_environment": dict(Counter(group.assignment.environment for group in groups)),
        "lag_mean": sum(lags) / len(lags),
        "lag_max": max(lags),
        "lag_counts": {str(lag): count for lag, count in sorted(Counter(lags).items())},
        "token_lag_counts": {str(lag): count for lag, count in sorted(token_lags.items())},
        "tokens": tokens,
        "loss_tokens": loss_tokens,
    }
