"""The rows of a plan, a portion of its micro-batches at a time, so that memory is bounded by the window.

    fetch portion 1 | fetch portion 2       | fetch portion 3 ...       (event loop)
                    | stitch, train portion 1 | stitch, train portion 2 ... (torch thread)

While one portion is trained the next one comes into the other half of the window. Rows that several portions share
(a group's prompt) come once, with the first of them. Rows that are refused are asked for once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import structlog

from slipstream.api.training.v1 import batch_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.trainer import telemetry
from slipstream.trainer.fetch import Part, RefId, RowsClient, ref_id
from slipstream.trainer.rows import RowForm, RowsRefused, references, stitch
from slipstream.trainer.sequence import Lost, TrainSequence
from slipstream.trainer.torch_thread import TorchThread

log = structlog.get_logger()


Made = TrainSequence | RowsRefused | None
"""Of a planned sequence: itself, what is wrong with it, or nothing as its rows are gone."""


@dataclass
class Portion:
    """Consecutive micro-batches whose rows are fetched together."""

    micro_batches: list[batch_pb2.MicroBatch] = field(default_factory=list)
    fetched: dict[RefId, types_pb2.RowsRef] = field(default_factory=dict)
    """What no earlier portion fetched."""
    kept: set[RefId] = field(default_factory=set)
    """What is here by now and later portions need again."""

    @property
    def size_bytes(self) -> int:
        return sum(ref.size_bytes for ref in self.fetched.values())


def cut(plan: batch_pb2.Plan, limit_bytes: int) -> list[Portion]:
    """Portions of at most `limit_bytes`, but of one micro-batch at least."""
    portions: list[Portion] = []
    last_use: dict[RefId, int] = {}
    held_bytes = 0
    for batch in plan.micro_batches:
        refs = {ref_id(ref): ref for planned in batch.sequences for ref in references(planned)}
        fresh = {key: ref for key, ref in refs.items() if key not in last_use}
        fresh_bytes = sum(ref.size_bytes for ref in fresh.values())
        if not portions or held_bytes + fresh_bytes > limit_bytes:
            portions.append(Portion())
            held_bytes = 0
        held_bytes += fresh_bytes
        portions[-1].micro_batches.append(batch)
        portions[-1].fetched |= fresh
        last_use |= dict.fromkeys(refs, len(portions) - 1)
    seen: set[RefId] = set()
    for number, portion in enumerate(portions):
        seen |= portion.fetched.keys()
        portion.kept = {key for key in seen if last_use[key] > number}
    return portions


@dataclass(frozen=True)
class Stitched:
    """Micro-batches ready to train, but for those of their sequences that had lost their rows, or had wrong ones."""

    micro_batches: list[list[TrainSequence | Lost]]
    refused: int
    """Among those lost."""


class PlanReader:
    """Reads plans one after another. The halves of its window are kept: fresh memory is paged in each time."""

    def __init__(self, client: RowsClient, torch: TorchThread, window_bytes: int) -> None:
        self._client = client
        self._torch = torch
        self._half_bytes = window_bytes // 2
        self._halves = [bytearray(), bytearray()]

    async def read(self, plan: batch_pb2.Plan, form: RowForm, group: asyncio.TaskGroup) -> AsyncIterator[Stitched]:
        """The plan's micro-batches in order. What is fetched ahead runs in `group`."""
        shared: dict[RefId, Part] = {}
        portions = cut(plan, self._half_bytes)
        fetching: list[asyncio.Task[dict[RefId, Part]]] = []
        for number in range(len(portions) + 1):
            if number < len(portions):
                fetching.append(group.create_task(self._fetch(portions[number], number % 2)))
            if number == 0:
                continue
            portion, parts = portions[number - 1], await fetching.pop(0)
            parts |= shared
            batches = await self._torch.run(_stitch, portion, parts, form)
            refused = [planned for planned, made in _pairs(portion, batches) if isinstance(made, RowsRefused)]
            if refused:
                parts |= await self._fetch_again(refused)
                batches = await self._torch.run(_stitch, portion, parts, form)
            shared = await self._torch.run(_kept_parts, portion, parts, shared)
            stitched = _kept(portion, batches)
            del batches  # the caller alone holds the sequences, and lets go of them before the next are stitched
            yield stitched

    async def _fetch(self, portion: Portion, half: int) -> dict[RefId, Part]:
        size_bytes = portion.size_bytes
        if len(self._halves[half]) < size_bytes:
            self._halves[half] = bytearray()  # before the larger one is there
            self._halves[half] = bytearray(size_bytes)
        return await self._client.fetch(portion.fetched.values(), memoryview(self._halves[half])[:size_bytes])

    async def _fetch_again(self, refused: Iterable[batch_pb2.PlannedSequence]) -> dict[RefId, Part]:
        """The rows of these sequences, once more, into memory of their own."""
        refs = {ref_id(ref): ref for planned in refused for ref in references(planned)}
        return await self._client.fetch(refs.values(), memoryview(bytearray(sum(r.size_bytes for r in refs.values()))))


def _stitch(portion: Portion, parts: Mapping[RefId, Part], form: RowForm) -> list[list[Made]]:
    """What each planned sequence of a portion becomes."""
    return [[_made(planned, parts, form) for planned in batch.sequences] for batch in portion.micro_batches]


def _made(planned: batch_pb2.PlannedSequence, parts: Mapping[RefId, Part], form: RowForm) -> Made:
    try:
        return stitch(planned, parts, form)
    except RowsRefused as error:
        log.warning("rows_refused", rollout_id=planned.rollout_id, field=error.field, detail=str(error))
        return error


def _pairs(portion: Portion, batches: list[list[Made]]) -> Iterator[tuple[batch_pb2.PlannedSequence, Made]]:
    for batch, made in zip(portion.micro_batches, batches, strict=True):
        yield from zip(batch.sequences, made, strict=True)


def _kept(portion: Portion, batches: list[list[Made]]) -> Stitched:
    """What can be trained; what was refused again is lost."""
    refused = [(planned, made) for planned, made in _pairs(portion, batches) if isinstance(made, RowsRefused)]
    for planned, error in refused:
        log.error("rollout_lost", rollout_id=planned.rollout_id, field=error.field, detail=str(error))
        telemetry.rollouts_refused.labels(error.field).inc()
    there = [
        [
            made if isinstance(made, TrainSequence) else Lost(max(0, planned.token_count - 1))
            for planned, made in zip(batch.sequences, made_of_batch, strict=True)
        ]
        for batch, made_of_batch in zip(portion.micro_batches, batches, strict=True)
    ]
    return Stitched(there, len(refused))


def _kept_parts(portion: Portion, parts: Mapping[RefId, Part], shared: Mapping[RefId, Part]) -> dict[RefId, Part]:
    """What later portions need again, copied once: its half will be written over."""
    kept = {key: parts[key] for key in portion.kept if key in parts}
    return {key: part if part is shared.get(key) else _copied(part) for key, part in kept.items()}


def _copied(part: Part) -> Part:
    return replace(part, data=memoryview(bytes(part.data)))
