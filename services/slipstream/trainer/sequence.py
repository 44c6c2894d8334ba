"""One sequence to train on, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream.common.version import PolicyVersion
from slipstream.engine.routes import RouteRows, route_dtype

if TYPE_CHECKING:
    from slipstream.models.routing import Routes

_INCARNATION_BITS = 40


def version_number(version: PolicyVersion) -> int:
    """A number that orders as versions do, for arrays."""
    return (version.incarnation << _INCARNATION_BITS) | version.step


@dataclass(frozen=True)
class Lost:
    """The place of a rollout whose tokens nobody has any more."""

    input_count: int


@dataclass(frozen=True)
class TrainSequence:
    """A rollout with its rows. N = tokens, R = trained tokens, L = MoE layers, K = experts a token."""

    token_ids: NDArray[np.int32]
    """`[N]`, prompt included."""

    target_positions: NDArray[np.int64]
    """`[R]`, ascending, from 1: the tokens the loss covers."""

    engine_logps: NDArray[np.float32]
    """`[R]`: the engine's log-probabilities of the targets, at `temperature`."""

    sampled_at: NDArray[np.int64]
    """`[R]`: version number of the weights that sampled each target."""

    kv_oldest: NDArray[np.int64]
    """`[R]`: version number of the oldest weights behind the KV it was sampled from."""

    routes: RouteRows
    """`[N - 1, L, K]`: recorded experts, and where there is no row."""

    advantage: float

    temperature: float = 1.0
    """That the targets were drawn with; the model's logits are divided by it."""

    unknown_logp_count: int = 0
    """Sampled tokens that are no targets, as the engine gave no log-probability: NaN, infinite or above 0."""

    teacher_logps: NDArray[np.float32] | None = None
    """`[R]`: what a teacher worker says of the targets, at `temperature`; above 0 where it was not asked."""

    @property
    def input_count(self) -> int:
        """Tokens that go through the model: the last one is a target only."""
        return len(self.token_ids) - 1

    @cached_property
    def known_N(self) -> NDArray[np.bool_]:
        """`[N - 1]`: positions whose experts are recorded."""
        return self.routes.known()

    @property
    def replayed_R(self) -> NDArray[np.bool_]:
        """Targets whose whole context went through the recorded routes."""
        replayed_N = np.logical_and.accumulate(self.known_N)
        mixed = (self.sampled_at != self.sampled_at[:1]).any() or (self.kv_oldest != self.sampled_at).any()
        if mixed and self.routes.recomputed_from is not None:  # else what was computed again came out the same
            replayed_N[self.routes.recomputed_from :] = False
        return replayed_N[self.target_positions - 1]


def plain_sequence(
    token_ids: Sequence[int] | NDArray[np.int32], form: Routes, target_positions: NDArray[np.int64] | None = None
) -> TrainSequence:
    """Tokens without a record of anything. Unless told, all but the first are targets."""
    count = len(token_ids) - 1
    targets = np.arange(1, count + 1) if target_positions is None else target_positions
    rows = np.zeros((count, form.moe_layers, form.top_k), route_dtype(form.expert_count))
    return TrainSequence(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        target_positions=targets,
        engine_logps=np.zeros(len(targets), np.float32),
        sampled_at=np.zeros(len(targets), np.int64),
        kv_oldest=np.zeros(len(targets), np.int64),
        routes=RouteRows(rows, 0, ((0, count),)),
        advantage=0.0,
    )
