"""Rows of a plan, stitched into sequences by token position. What of them is copied is copied here, once.

A sequence without its tokens is lost; a position without a route is routed live.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.api.training.v1 import batch_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.version import PolicyVersion
from slipstream.engine.routes import RouteRows, route_dtype, stitch_routes
from slipstream.trainer.fetch import Part, RefId, ref_id
from slipstream.trainer.sequence import TrainSequence, version_number

if TYPE_CHECKING:
    from slipstream.models.routing import Routes


@dataclass(frozen=True)
class RouteForm:
    """What a row of expert routes is for one model."""

    row_shape: tuple[int, int]
    """MoE layers, top k."""

    dtype: np.dtype[np.unsignedinteger]

    @classmethod
    def of(cls, routes: Routes) -> RouteForm:
        return cls((routes.moe_layers, routes.top_k), route_dtype(routes.expert_count))

    def __str__(self) -> str:
        return f"{self.dtype.name} {self.row_shape}"


def references(planned: batch_pb2.PlannedSequence) -> list[types_pb2.RowsRef]:
    """Every reference of a sequence."""
    return [planned.token_ids, planned.logprobs, *planned.routes]


def stitch(planned: batch_pb2.PlannedSequence, parts: Mapping[RefId, Part], form: RouteForm) -> TrainSequence | None:
    """The sequence, or None when its tokens or log-probabilities are gone."""
    count = planned.token_count
    token_ids = _whole(planned.token_ids, parts, count, "<i4")
    logps = _whole(planned.logprobs, parts, count, "<f4")
    if token_ids is None or logps is None:
        return None
    covered = np.zeros(count, dtype=bool)
    for span in planned.loss_ranges:
        covered[max(1, span.start) : span.end] = True  # nothing predicts the first token
    targets = np.flatnonzero(covered)
    sampled_at, kv_oldest = _versions(planned.spans, len(targets))
    # Above 0, infinite, or no number: unknown, so there is nothing to divide by.
    known = (logps[targets] <= 0) & np.isfinite(logps[targets])
    if len(targets) and not known.any():
        return None
    return TrainSequence(
        token_ids=token_ids,
        target_positions=targets[known],
        engine_logps=logps[targets][known],
        sampled_at=sampled_at[known],
        kv_oldest=kv_oldest[known],
        routes=_routes(planned.routes, parts, count - 1, form),
        advantage=planned.advantage,
        temperature=planned.temperature or 1.0,
        unknown_logp_count=int((~known).sum()),
    )


def _whole(ref: types_pb2.RowsRef, parts: Mapping[RefId, Part], count: int, dtype: str) -> NDArray[Any] | None:
    """A copy of the scalars of positions [0, count), or None if the holder lacks some."""
    part = parts.get(ref_id(ref))
    if part is None or part.first_position != 0:
        return None
    values = np.frombuffer(part.data, dtype=dtype)
    return values[:count].copy() if len(values) >= count else None


def _versions(spans: Iterable[types_pb2.VersionSpan], target_count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Version numbers of the targets. Spans cover all sampled tokens; a loss that covers fewer covers the last ones."""
    sampled: list[int] = []
    oldest: list[int] = []
    for span in spans:
        sampled += [version_number(PolicyVersion.from_proto(span.version))] * span.token_count
        oldest += [version_number(PolicyVersion.from_proto(span.kv_oldest_version))] * span.token_count
    if len(sampled) < target_count:
        raise ValueError(f"versions of {len(sampled)} tokens for {target_count} targets")
    start = len(sampled) - target_count
    return np.array(sampled[start:], dtype=np.int64), np.array(oldest[start:], dtype=np.int64)


def _routes(refs: Iterable[types_pb2.RowsRef], parts: Mapping[RefId, Part], count: int, form: RouteForm) -> RouteRows:
    """Rows of positions [0, count); the first reference that knows a position wins, the rest stay unknown."""
    segments: list[RouteRows] = []
    for ref in refs:
        part = parts.get(ref_id(ref))
        if part is None:
            continue
        if (ref.dtype, tuple(ref.row_shape)) != (form.dtype.name, form.row_shape):
            raise ValueError(f"routes of {ref.key!r} are {ref.dtype} {tuple(ref.row_shape)}, the model's {form}")
        rows = np.frombuffer(part.data, dtype=form.dtype).reshape(-1, *form.row_shape)
        segments.append(RouteRows(rows, part.first_position, part.unknown_ranges, part.recomputed_from))
    return stitch_routes(segments, 0, count, form.row_shape, form.dtype)
