"""Placement leases: counted against their workers until released or expired."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from slipstream.common.errors import PoolSaturated
from slipstream.router.pool import Worker


@dataclass(frozen=True)
class Placement:
    """A turn's place on two workers."""

    placement_id: str
    group_id: str
    prefill: Worker | None
    """None where the decode worker computes the prompt."""
    decode: Worker
    prefill_epoch: str
    decode_epoch: str
    sample_count: int
    expires_at_s: float
    runner_id: str = ""
    """Who holds it."""
    runner_epoch: str = ""
    """Of that runner's process; those of later ones compare greater."""

    def count(self, sign: int) -> None:
        """Add it to what its workers are thought to run, or take it off again."""
        self.decode.placed_samples += sign * self.sample_count
        self.decode.placement_count += sign
        if self.prefill is not None:
            self.prefill.placed_samples += sign
            self.prefill.placement_count += sign


class PlacementLeases:
    """Holds every open placement. Expiry order equals creation order, so the oldest is checked first."""

    def __init__(self, ttl_s: float, capacity: int) -> None:
        self.ttl_s = ttl_s
        self._capacity = capacity
        self._open: OrderedDict[str, Placement] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def held(self) -> list[Placement]:
        return list(self._open.values())

    def runners(self) -> set[str]:
        """Who holds any, as far as they said."""
        return {placement.runner_id for placement in self._open.values() if placement.runner_id}

    def add(self, placement: Placement) -> None:
        """Count a placement against its workers.

        Raises:
            PoolSaturated: the bound on open placements is reached.
        """
        if len(self._open) >= self._capacity:
            raise PoolSaturated(
                f"{self._capacity} placements are open (router.max_placements)",
                pool="placements",
                name="router.max_placements",
                limit=self._capacity,
            )
        self._open[placement.placement_id] = placement
        placement.count(1)

    def release(self, placement_id: str) -> bool:
        """End a lease; false if it is not open."""
        placement = self._open.pop(placement_id, None)
        if placement is None:
            return False
        placement.count(-1)
        return True

    def end_earlier(self, runner_id: str, runner_epoch: str) -> list[str]:
        """End every lease that earlier processes of a runner hold and return their ids."""
        ended = [
            placement_id
            for placement_id, placement in self._open.items()
            if placement.runner_id == runner_id and placement.runner_epoch < runner_epoch
        ]
        for placement_id in ended:
            self.release(placement_id)
        return ended

    def expire(self, now_s: float) -> list[str]:
        """End every lease whose time is over and return their ids."""
        expired: list[str] = []
        for placement_id, placement in self._open.items():
            if placement.expires_at_s > now_s:
                break
            expired.append(placement_id)
        for placement_id in expired:
            self.release(placement_id)
        return expired
