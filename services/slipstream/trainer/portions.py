"""The rows of a plan, a portion of its micro-batches at a time, so that memory is bounded by the window.

    fetch portion 1 | fetch portion 2       | fetch portion 3 ...       (event loop)
                    | stitch, train portion 1 | stitch, train portion 2 ... (torch thread)

While one portion is trained the next one comes into the other half of the window. Rows that several portions share
(a group's prompt) come once, with the first of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from slipstream.api.training.v1 import batch_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.trainer.fetch import Part, RefId, RowsClient, ref_id
from slipstream.trainer.rows import RouteForm, references, stitch
from slipstream.trainer.sequence import TrainSequence
from slipstream.trainer.torch_thread import TorchThread


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
    """Micro-batches ready to train, and how many of their sequences had lost their rows."""

    micro_batches: list[list[TrainSequence]]
    lost: int


class PlanReader:
    """Reads plans one after another. The halves of its window are kept: fresh memory is paged in each time."""

    def __init__(self, client: RowsClient, torch: TorchThread, window_bytes: int) -> None:
        self._client = client
        self._torch = torch
        self._half_bytes = window_bytes // 2
        self._halves = [bytearray(), bytearray()]

    async def read(self, plan: batch_pb2.Plan, form: RouteForm, group: asyncio.TaskGroup) -> AsyncIterator[Stitched]:
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
            stitched, shared = await self._torch.run(_stitch, portion, parts, shared, form)
            yield stitched

    async def _fetch(self, portion: Portion, half: int) -> dict[RefId, Part]:
        size_bytes = portion.size_bytes
        if len(self._halves[half]) < size_bytes:
            self._halves[half] = bytearray()  # before the larger one is there
            self._halves[half] = bytearray(size_bytes)
        return await self._client.fetch(portion.fetched.values(), memoryview(self._halves[half])[:size_bytes])


def _stitch(
    portion: Portion, fetched: dict[RefId, Part], shared: dict[RefId, Part], form: RouteForm
) -> tuple[Stitched, dict[RefId, Part]]:
    """The sequences of a portion, and copies of what later ones need again: its half will be written over."""
    parts = fetched | shared
    batches = [[stitch(planned, parts, form) for planned in batch.sequences] for batch in portion.micro_batches]
    kept = [[sequence for sequence in batch if sequence is not None] for batch in batches]
    again = {key: shared.get(key) or _copied(fetched[key]) for key in portion.kept if key in parts}
    return Stitched(kept, sum(map(len, batches)) - sum(map(len, kept))), again


def _copied(part: Part) -> Part:
    return replace(part, data=memoryview(bytes(part.data)))
