"""Rows of a plan: fetched by reference, one stream a holder, and stitched into sequences by token position.

Until here rows are opaque bytes. Tokens and log-probabilities come from runners, routes from prefill workers (prompt)
and decode workers (the rest). A sequence without its tokens is lost; a position without a route is routed live.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import structlog
from numpy.typing import NDArray

from slipstream.api.rollout.v1 import rows_pb2
from slipstream.api.training.v1 import batch_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.channels import Channels
from slipstream.common.errors import DeadlineExceeded, Draining, FrameInvalid, Unreachable, from_rpc_error
from slipstream.common.frames import iter_data, raw_responses, raw_unary_stream, read_header
from slipstream.common.version import PolicyVersion
from slipstream.engine.routes import Ranges, RouteRows, route_dtype, stitch_routes
from slipstream.trainer.sequence import TrainSequence, version_number

if TYPE_CHECKING:
    from slipstream.models.routing import Routes

log = structlog.get_logger()

_FETCH_ROWS = "/slipstream.api.rollout.v1.RowsService/FetchRows"
_RETRIED = (Unreachable, Draining, FrameInvalid)
MAX_ATTEMPTS = 5
RETRY_PAUSE_S = 0.2

RefId = tuple[str, str]
"""Holder and key."""


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


@dataclass(frozen=True)
class Part:
    """The rows of one reference."""

    first_position: int
    data: memoryview
    unknown_ranges: Ranges = ()
    recomputed_from: int | None = None


@dataclass
class _Download:
    """The answer of one holder as it comes, over any number of streams."""

    header: rows_pb2.RowsHeader | None = None
    data: bytearray | None = None
    held: int = 0

    def open(self, header: rows_pb2.RowsHeader) -> None:
        if self.header is None or self.data is None or header != self.header:
            # The first stream, or the holder has lost or released rows since: what is held no longer fits.
            self.header, self.data, self.held = header, bytearray(header.size_bytes), 0

    def take(self, frame: memoryview) -> None:
        assert self.data is not None
        if self.held + len(frame) > len(self.data):
            raise FrameInvalid("more bytes than announced", size_bytes=len(self.data))
        self.data[self.held : self.held + len(frame)] = frame
        self.held += len(frame)


class RowsClient:
    """Fetches from all holders. Channels are opened once. The orchestrator tells holders what to release."""

    def __init__(self, open_channel: Callable[[str], grpc.aio.Channel], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._channels = Channels(open_channel)

    async def fetch(self, refs: Iterable[types_pb2.RowsRef]) -> dict[RefId, Part]:
        """The parts that are held, of all holders at once; missing ones are absent."""
        by_holder: dict[str, dict[str, types_pb2.RowsRef]] = defaultdict(dict)
        for ref in refs:
            by_holder[ref.holder].setdefault(ref.key, ref)
        async with asyncio.TaskGroup() as group:
            tasks = {
                holder: group.create_task(self._fetch_holder(holder, list(held.values())))
                for holder, held in by_holder.items()
            }
        return {(holder, key): part for holder, task in tasks.items() for key, part in task.result().items()}

    async def close(self) -> None:
        await self._channels.close()

    async def _fetch_holder(self, holder: str, refs: Sequence[types_pb2.RowsRef]) -> dict[str, Part]:
        """Fetch, resuming where a stream breaks. A holder that stays away has none of the rows."""
        download = _Download()
        failures = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    before = download.held
                    try:
                        await self._receive(holder, refs, download)
                        return _cut(refs, download)
                    except _RETRIED as error:
                        failures = 0 if download.held > before else failures + 1
                        if failures >= MAX_ATTEMPTS:
                            raise
                        log.info("rows_fetch_resumed", holder=holder, offset_bytes=before, reason=error.reason)
                    await asyncio.sleep(RETRY_PAUSE_S)
        except (*_RETRIED, DeadlineExceeded, TimeoutError) as error:
            log.warning("rows_holder_away", holder=holder, ref_count=len(refs), detail=str(error))
            return {}

    async def _receive(self, holder: str, refs: Sequence[types_pb2.RowsRef], download: _Download) -> None:
        """Take what one stream gives, from where the last one ended."""
        request = rows_pb2.FetchRowsRequest(refs=refs, offset_bytes=download.held)
        call: Any = raw_unary_stream(self._channels.get(holder), _FETCH_ROWS)(request, timeout=self._timeout_s)
        try:
            messages = raw_responses(call)
            header = await read_header(messages, rows_pb2.RowsHeader)
            offset = download.held
            download.open(header)
            if download.held != offset:
                raise FrameInvalid("the holder's rows changed between two streams")
            async for frame in iter_data(messages):
                download.take(frame)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
        if download.held != header.size_bytes:
            raise FrameInvalid("fewer bytes than announced", size_bytes=header.size_bytes)


def _cut(refs: Sequence[types_pb2.RowsRef], download: _Download) -> dict[str, Part]:
    """The parts of a whole answer."""
    header, data = download.header, download.data
    assert header is not None
    assert data is not None
    if zlib.crc32(data) != header.crc32 or len(header.parts) != len(refs):
        download.header, download.held = None, 0  # start over
        raise FrameInvalid("rows do not match their announcement")
    view, start, parts = memoryview(data), 0, {}
    for ref, part in zip(refs, header.parts, strict=True):
        if not part.missing:
            unknown = tuple((each.start, each.end) for each in part.unknown_ranges)
            recomputed_from = part.recomputed_from if part.HasField("recomputed_from") else None
            parts[ref.key] = Part(part.first_position, view[start : start + part.size_bytes], unknown, recomputed_from)
        start += part.size_bytes
    return parts


def references(plan: batch_pb2.Plan) -> list[types_pb2.RowsRef]:
    """Every reference of a plan."""
    return [
        ref
        for batch in plan.micro_batches
        for planned in batch.sequences
        for ref in (planned.token_ids, planned.logprobs, *planned.routes)
    ]


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
    known = logps[targets] <= 0  # above it, or no number: unknown, so there is nothing to divide by
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
    )


def _whole(ref: types_pb2.RowsRef, parts: Mapping[RefId, Part], count: int, dtype: str) -> NDArray[Any] | None:
    """Scalars of positions [0, count), or None if the holder lacks some."""
    part = parts.get((ref.holder, ref.key))
    if part is None or part.first_position != 0:
        return None
    values = np.frombuffer(part.data, dtype=dtype)
    return values[:count] if len(values) >= count else None


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
        part = parts.get((ref.holder, ref.key))
        if part is None:
            continue
        if (ref.dtype, tuple(ref.row_shape)) != (form.dtype.name, form.row_shape):
            raise ValueError(f"routes of {ref.key!r} are {ref.dtype} {tuple(ref.row_shape)}, the model's {form}")
        rows = np.frombuffer(part.data, dtype=form.dtype).reshape(-1, *form.row_shape)
        segments.append(RouteRows(rows, part.first_position, part.unknown_ranges, part.recomputed_from))
    return stitch_routes(segments, 0, count, form.row_shape, form.dtype)
