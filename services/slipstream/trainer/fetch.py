"""Rows by reference: one stream a holder, resumed where it breaks, its bytes put where the caller says.

Until they are stitched (rows.py), rows are opaque bytes. Tokens and log-probabilities come from runners, routes from
prefill workers (prompt) and decode workers (the rest). A holder that stays away has none of the rows; one that falls
silent, or does not answer, is given up early where it has routes alone, which a sequence can do without. Tokens it
cannot: a runner that is started again serves what it had.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from slipstream.api.rollout.v1 import rows_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.channels import Channels
from slipstream.common.crc import crc32
from slipstream.common.errors import DeadlineExceeded, Draining, FrameInvalid, TooManyFiles, Unreachable, from_rpc_error
from slipstream.common.frames import iter_data, raw_responses, raw_unary_stream, read_header
from slipstream.engine.routes import Ranges

log = structlog.get_logger()

_FETCH_ROWS = "/slipstream.api.rollout.v1.RowsService/FetchRows"
_RETRIED = (Unreachable, Draining, FrameInvalid, TooManyFiles)
MAX_ATTEMPTS = 5
RETRY_PAUSE_S = 0.2
MAX_REFS = 4096
"""Of one stream: the holder checks and reads a request's references in one go."""

RefId = tuple[str, str, int, int]
"""Holder, key, and the positions asked for: those who share rows refer to them alike."""


def ref_id(ref: types_pb2.RowsRef) -> RefId:
    return ref.holder, ref.key, ref.ranges[0].start if ref.ranges else 0, ref.ranges[-1].end if ref.ranges else 0


@dataclass(frozen=True)
class Part:
    """The rows of one reference."""

    first_position: int
    data: memoryview
    unknown_ranges: Ranges = ()
    recomputed_from: int | None = None
    excess_bytes: int = 0
    """More than the reference names were announced, so none of them were taken."""


class TooLong(Exception):
    """The holder has more bytes of some references than they name, which cannot be the rows they mean."""

    def __init__(self, parts: dict[RefId, Part]) -> None:
        super().__init__(f"more bytes than {len(parts)} references name")
        self.parts = parts


@dataclass
class Download:
    """The answer of one holder as it comes, over any number of streams, into memory that is the caller's."""

    memory: memoryview
    header: rows_pb2.RowsHeader | None = None
    held: int = 0
    crc32: int = 0
    heard: Callable[[], None] = lambda: None
    """Called at each message."""

    def open(self, header: rows_pb2.RowsHeader, refs: Sequence[types_pb2.RowsRef]) -> None:
        """Take an announcement. Raises `TooLong`, after which the rest may be asked for from the start."""
        self.heard()
        longer = {
            ref_id(ref): Part(part.first_position, memoryview(b""), excess_bytes=part.size_bytes - ref.size_bytes)
            for ref, part in zip(refs, header.parts, strict=False)
            if part.size_bytes > ref.size_bytes and not part.missing
        }
        if longer:
            self.header, self.held, self.crc32 = None, 0, 0
            raise TooLong(longer)
        if header.size_bytes > len(self.memory):
            raise FrameInvalid("more bytes than the references name", size_bytes=header.size_bytes)
        if header != self.header:
            # The first stream, or the holder has lost or released rows since: what is held no longer fits.
            self.header, self.held, self.crc32 = header, 0, 0

    def take(self, frame: memoryview) -> None:
        assert self.header is not None
        self.heard()
        end = self.held + len(frame)
        if end > self.header.size_bytes:
            raise FrameInvalid("more bytes than announced", size_bytes=self.header.size_bytes)
        self.memory[self.held : end] = frame
        self.held, self.crc32 = end, crc32(frame, self.crc32)

    def parts(self, refs: Sequence[types_pb2.RowsRef]) -> dict[RefId, Part]:
        """The parts of a whole answer."""
        header = self.header
        assert header is not None
        if self.crc32 != header.crc32 or len(header.parts) != len(refs):
            self.header, self.held = None, 0  # start over
            raise FrameInvalid("rows do not match their announcement")
        start, parts = 0, {}
        for ref, part in zip(refs, header.parts, strict=True):
            if not part.missing:
                unknown = tuple((each.start, each.end) for each in part.unknown_ranges)
                recomputed_from = part.recomputed_from if part.HasField("recomputed_from") else None
                data = self.memory[start : start + part.size_bytes]
                parts[ref_id(ref)] = Part(part.first_position, data, unknown, recomputed_from)
            start += part.size_bytes
        return parts


class RowsClient:
    """Fetches from all holders. Channels are opened once. The orchestrator tells holders what to release."""

    def __init__(
        self, open_channel: Callable[[str], grpc.aio.Channel], timeout_s: float, routes_silence_s: float = 5.0
    ) -> None:
        self._timeout_s = timeout_s
        self._routes_silence_s = routes_silence_s
        self._channels = Channels(open_channel)

    async def fetch(self, refs: Iterable[types_pb2.RowsRef], memory: memoryview) -> dict[RefId, Part]:
        """The parts that are held, of all holders at once; missing ones are absent. `refs` differ from each other.

        Parts lie in `memory`, which has room for `size_bytes` of all references.
        """
        by_holder: dict[str, list[types_pb2.RowsRef]] = defaultdict(list)
        for ref in refs:
            by_holder[ref.holder].append(ref)
        tasks: list[asyncio.Task[dict[RefId, Part]]] = []
        async with asyncio.TaskGroup() as group:
            for holder, held in by_holder.items():
                for first in range(0, len(held), MAX_REFS):
                    asked = held[first : first + MAX_REFS]
                    size_bytes = sum(ref.size_bytes for ref in asked)
                    tasks.append(group.create_task(self._fetch_holder(holder, asked, memory[:size_bytes])))
                    memory = memory[size_bytes:]
        return {key: part for task in tasks for key, part in task.result().items()}

    async def close(self) -> None:
        await self._channels.close()

    async def _fetch_holder(
        self, holder: str, refs: Sequence[types_pb2.RowsRef], memory: memoryview
    ) -> dict[RefId, Part]:
        """Fetch, resuming where a stream breaks. A holder that stays away has none of the rows."""
        download = Download(memory)
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s), self._heard(refs, download):
                return await self._resume(holder, refs, download)
        except (*_RETRIED, DeadlineExceeded, TimeoutError) as error:
            log.warning(
                "rows_holder_away",
                holder=holder,
                ref_count=len(refs),
                held_bytes=download.held,
                waited_s=round(time.monotonic() - started_s, 3),
                detail=str(error) or f"it did not send all in {self._timeout_s:g} s",
            )
            return {}

    @asynccontextmanager
    async def _heard(self, refs: Sequence[types_pb2.RowsRef], download: Download) -> AsyncIterator[None]:
        """Ends in a `TimeoutError` that says how long a holder of routes alone was silent; tokens are waited for."""
        silence_s = self._routes_silence_s if all(ref.row_shape for ref in refs) else None
        loop, limit = asyncio.get_running_loop(), asyncio.timeout(silence_s)
        try:
            async with limit:
                if silence_s is not None:
                    download.heard = lambda: limit.reschedule(loop.time() + silence_s)
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(f"it was silent for {silence_s:g} s") from None

    async def _resume(self, holder: str, refs: Sequence[types_pb2.RowsRef], download: Download) -> dict[RefId, Part]:
        failures, too_long = 0, dict[RefId, Part]()
        awaited = (Unreachable, Draining, TooManyFiles) if any(not ref.row_shape for ref in refs) else ()
        while len(too_long) < len(refs):
            asked = [ref for ref in refs if ref_id(ref) not in too_long]
            before = download.held
            try:
                await self._receive(holder, asked, download)
                return {**download.parts(asked), **too_long}
            except TooLong as error:  # they cost what refers to them, and nothing else
                log.warning("rows_too_long", holder=holder, keys=[key for _, key, _, _ in error.parts][:3])
                too_long |= error.parts
                continue
            except _RETRIED as error:
                failures = 0 if download.held > before else failures + 1
                if failures >= MAX_ATTEMPTS and not isinstance(error, awaited):
                    raise
                log.info("rows_fetch_resumed", holder=holder, offset_bytes=before, reason=error.reason)
            await asyncio.sleep(RETRY_PAUSE_S)
        return too_long

    async def _receive(self, holder: str, refs: Sequence[types_pb2.RowsRef], download: Download) -> None:
        """Take what one stream gives, from where the last one ended."""
        offset = download.held
        request = rows_pb2.FetchRowsRequest(refs=refs, offset_bytes=offset)
        call: Any = raw_unary_stream(self._channels.get(holder), _FETCH_ROWS)(request, timeout=self._timeout_s)
        try:
            messages = raw_responses(call)
            header = await read_header(messages, rows_pb2.RowsHeader)
            download.open(header, refs)
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
