"""What the router knows of each worker: state, load, cached blocks and its own placements."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from slipstream.api.inference.v1 import worker_pb2
from slipstream.common.rank_groups import RankGroup
from slipstream.common.version import UNSET, PolicyVersion

KV_EVENT = struct.Struct("<BQ")
"""One KV event on the wire: kind, block hash."""
STORED, REMOVED, CLEARED = 1, 2, 3


class PrefixIndex:
    """Block hashes that one worker holds, bounded; the oldest are forgotten first."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def clear(self) -> None:
        self._hashes.clear()

    def apply(self, events: bytes) -> None:
        """Apply packed events. A torn last record is ignored: the next reset heals it."""
        usable = len(events) - len(events) % KV_EVENT.size
        for kind, block_hash in KV_EVENT.iter_unpack(events[:usable]):
            if kind == STORED:
                self._hashes[block_hash] = None
                self._hashes.move_to_end(block_hash)
            elif kind == REMOVED:
                self._hashes.pop(block_hash, None)
            elif kind == CLEARED:
                self._hashes.clear()
        while len(self._hashes) > self._capacity_blocks:
            self._hashes.popitem(last=False)

    def matched_blocks(self, block_hashes: Sequence[int]) -> int:
        """Length of the longest prefix of the chain that is held, in blocks."""
        count = 0
        for block_hash in block_hashes:
            if block_hash not in self._hashes:
                break
            count += 1
        return count


@dataclass
class Worker:
    """One worker as seen through its load reports. `epoch` changes when its process does."""

    replica: str
    address: str
    role: worker_pb2.WorkerRole
    prefix: PrefixIndex
    epoch: str = ""
    group: RankGroup | None = None
    state: worker_pb2.WorkerState = worker_pb2.WORKER_STATE_UNSPECIFIED
    version: PolicyVersion = UNSET
    load: worker_pb2.Load = field(default_factory=worker_pb2.Load)
    limits: worker_pb2.WorkerLimits = field(default_factory=worker_pb2.WorkerLimits)
    reported_at_s: float = float("-inf")
    placed_samples: int = 0
    placement_count: int = 0

    def heard(self, report: worker_pb2.WatchLoadResponse, now_s: float) -> bool:
        """Take a load report in; true if state, version or epoch changed."""
        version = PolicyVersion.from_proto(report.version)
        changed = (report.epoch, report.state, version) != (self.epoch, self.state, self.version)
        self.group = RankGroup.of(report)
        if report.epoch != self.epoch or report.kv_events_reset:
            self.prefix.clear()
        self.epoch, self.state, self.version = report.epoch, report.state, version
        self.load.CopyFrom(report.load)
        self.prefix.apply(report.kv_events)
        self.reported_at_s = now_s
        return changed

    def lost(self) -> None:
        """Its stream broke: not routable until it is heard of again."""
        self.reported_at_s = float("-inf")

    def routable(self, now_s: float, silence_s: float) -> bool:
        """Whether it takes requests, as far as it alone is concerned: see `in_whole_groups`."""
        return self.state == worker_pb2.WORKER_STATE_SERVING and now_s - self.reported_at_s <= silence_s

    @property
    def busy_samples(self) -> int:
        """Samples it runs, at least those placed here that a report cannot show yet."""
        return max(self.load.running_sample_count, self.placed_samples)

    def cached_tokens(self, block_hashes: Sequence[int]) -> int:
        """Tokens of a prompt that it is thought to hold."""
        return self.prefix.matched_blocks(block_hashes) * self.limits.block_size_tokens

    def saturated(self, more_samples: int, fraction: float) -> bool:
        slots = self.limits.max_running_samples
        if slots and self.busy_samples + more_samples > max(slots * fraction, 1):
            return True
        blocks = self.load.blocks_total
        return bool(blocks) and self.load.blocks_used > blocks * fraction


class WorkerPool:
    """All workers of both pools, by replica name."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = {worker.replica: worker for worker in workers}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def get(self, replica: str) -> Worker | None:
        return self._workers.get(replica)

    def of_role(self, role: worker_pb2.WorkerRole) -> list[Worker]:
        return [worker for worker in self if worker.role == role]
