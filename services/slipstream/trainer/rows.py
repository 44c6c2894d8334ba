"""Rows of a plan, stitched into sequences by token position. What of them is copied is copied here, once.

A sequence without its tokens is lost; a position without a route is routed live; rows that cannot be what the plan or
the model says are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.api.training.v1 import batch_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.version import PolicyVersion
from slipstream.engine.routes import RouteRows, route_dtype, stitch_routes
from slipstream.trainer.expert_rows import fault
from slipstream.trainer.fetch import Part, RefId, ref_id
from slipstream.trainer.sequence import TrainSequence, version_number

if TYPE_CHECKING:
    from slipstream.models.base import Model


class RowsRefused(Exception):
    """A field of a planned sequence, or the rows it refers to, cannot be right. Names the field."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(f"{field}: {detail}")
        self.field = field


@dataclass(frozen=True)
class RowForm:
    """What rows are for one model, at one version of its weights."""

    row_shape: tuple[int, int]
    """Of expert routes: MoE layers, top k."""

    dtype: np.dtype[np.unsignedinteger]
    """Of expert routes."""

    expert_count: int
    vocab_size: int

    trained: PolicyVersion
    """The weights that are trained: no token was sampled by later ones."""

    @classmethod
    def of(cls, model: Model, trained: PolicyVersion) -> RowForm:
        routes = model.routes
        shape = (routes.moe_layers, routes.top_k)
        return cls(shape, route_dtype(routes.expert_count), routes.expert_count, model.sizes.vocab_size, trained)


def references(planned: batch_pb2.PlannedSequence) -> list[types_pb2.RowsRef]:
    """Every reference of a sequence."""
    teacher = [planned.teacher_logprobs] if planned.HasField("teacher_logprobs") else []
    return [planned.token_ids, planned.logprobs, *teacher, *planned.routes]


def stitch(planned: batch_pb2.PlannedSequence, parts: Mapping[RefId, Part], form: RowForm) -> TrainSequence | None:
    """The sequence, or None when its tokens or log-probabilities are gone. Raises `RowsRefused`."""
    count = planned.token_count
    token_ids = _whole("token_ids", planned.token_ids, parts, count, np.dtype("<i4"))
    logps = _whole("logprobs", planned.logprobs, parts, count, np.dtype("<f4"))
    if token_ids is None or logps is None:
        return None
    judged = None
    if planned.HasField("teacher_logprobs"):
        judged = _whole("teacher_logprobs", planned.teacher_logprobs, parts, count, np.dtype("<f4"))
        if judged is None:
            return None
    if count < 2:
        raise RowsRefused("token_count", f"{count} tokens predict nothing")
    if token_ids.min() < 0 or token_ids.max() >= form.vocab_size:
        raise RowsRefused(
            "token_ids", f"from {token_ids.min()} to {token_ids.max()}, the vocabulary has {form.vocab_size}"
        )
    for name, value in (("advantage", planned.advantage), ("temperature", planned.temperature)):
        if not np.isfinite(value):
            raise RowsRefused(name, f"{value} is not finite")
    covered = np.zeros(count, dtype=bool)
    for span in planned.loss_ranges:
        if not 0 <= span.start < span.end <= count:
            raise RowsRefused("loss_ranges", f"[{span.start}, {span.end}) of {count} tokens")
        covered[max(1, span.start) : span.end] = True  # nothing predicts the first token
    targets = np.flatnonzero(covered)
    sampled_at, kv_oldest = _versions(planned.spans, len(targets), form.trained)
    # Above 0, infinite, or no number: unknown, so there is nothing to divide by.
    known = (logps[targets] <= 0) & np.isfinite(logps[targets])
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
        teacher_logps=None if judged is None else judged[targets][known],
    )


def _whole(
    field: str, ref: types_pb2.RowsRef, parts: Mapping[RefId, Part], count: int, dtype: np.dtype[Any]
) -> NDArray[Any] | None:
    """A copy of the scalars of positions [0, count), or None if the holder lacks some."""
    part = parts.get(ref_id(ref))
    if part is None:
        return None
    _check_size(field, ref, part)
    if part.first_position != 0:
        return None
    values = _rows(field, ref, part, dtype, ())
    return values[:count].copy() if len(values) >= count else None


def _rows(
    field: str, ref: types_pb2.RowsRef, part: Part, dtype: np.dtype[Any], row_shape: tuple[int, ...]
) -> NDArray[Any]:
    """The rows of a part, not copied."""
    _check_size(field, ref, part)
    if ref.dtype != dtype.name:
        raise RowsRefused(f"{field}.dtype", f"{ref.key!r} is {ref.dtype}, {dtype.name} is needed")
    if tuple(ref.row_shape) != row_shape:
        raise RowsRefused(f"{field}.row_shape", f"{ref.key!r} has {tuple(ref.row_shape)}, {row_shape} is needed")
    row_bytes = dtype.itemsize * math.prod(row_shape)
    if part.data.nbytes % row_bytes:
        raise RowsRefused(f"{field}.size_bytes", f"{ref.key!r} has {part.data.nbytes} bytes, a row {row_bytes}")
    return np.frombuffer(part.data, dtype=dtype).reshape(-1, *row_shape)


def _check_size(field: str, ref: types_pb2.RowsRef, part: Part) -> None:
    if part.excess_bytes:
        detail = f"{ref.key!r} has {part.excess_bytes} bytes more than the {ref.size_bytes} of its reference"
        raise RowsRefused(f"{field}.size_bytes", detail)


def _versions(
    spans: Iterable[types_pb2.VersionSpan], target_count: int, trained: PolicyVersion
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Version numbers of the targets. Spans cover all sampled tokens; a loss that covers fewer covers the last ones."""
    sampled: list[int] = []
    oldest: list[int] = []
    for span in spans:
        version, kv_oldest = PolicyVersion.from_proto(span.version), PolicyVersion.from_proto(span.kv_oldest_version)
        if max(version, kv_oldest) > trained:
            raise RowsRefused("spans.version", f"{max(version, kv_oldest)} is later than {trained}, which is trained")
        sampled += [version_number(version)] * span.token_count
        oldest += [version_number(kv_oldest)] * span.token_count
    if len(sampled) < target_count:
        raise RowsRefused("spans", f"versions of {len(sampled)} tokens for {target_count} targets")
    start = len(sampled) - target_count
    return np.array(sampled[start:], dtype=np.int64), np.array(oldest[start:], dtype=np.int64)


def _routes(refs: Iterable[types_pb2.RowsRef], parts: Mapping[RefId, Part], count: int, form: RowForm) -> RouteRows:
    """Rows of positions [0, count); the first reference that knows a position wins, the rest stay unknown."""
    if not form.row_shape[0]:  # a dense model: workers name none
        return RouteRows(np.empty((count, *form.row_shape), form.dtype), 0)
    segments: list[RouteRows] = []
    for ref in refs:
        part = parts.get(ref_id(ref))
        if part is None:
            continue
        rows = _rows("routes", ref, part, form.dtype, form.row_shape)
        segments.append(RouteRows(rows, part.first_position, part.unknown_ranges, part.recomputed_from))
    stitched = stitch_routes(segments, 0, count, form.row_shape, form.dtype)
    _check_experts(stitched, form)
    return stitched


def _check_experts(routes: RouteRows, form: RowForm) -> None:
    """Every token whose row is known takes K different experts that exist."""
    ends = [routes.first_position, *(end for span in routes.unknown_ranges for end in span), routes.end]
    for start, end in zip(ends[::2], ends[1::2], strict=True):
        found = fault(routes.between(start, end).rows.reshape(-1, form.row_shape[1]), form.expert_count)
        if found is not None:
            raise RowsRefused("routes", found)
