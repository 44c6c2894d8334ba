"""The turns of an attempt at a group, kept as they end, and taken from there when the attempt is taken up again.

What is kept of a turn is what the model said in it. What it said that to is made again: the environment begins its
episodes anew and is told the kept answers one by one, and as long as the prompts that come of it are the same, token
by token, the kept turns are those that would be sampled. Where the environment says something else, since it is no
pure function of what it is told, the rollout goes on from there by itself: all before is as it was sampled.
"""

from __future__ import annotations

import zlib
from array import array

import structlog

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.runner import telemetry
from slipstream.runner.rollout import Rollout
from slipstream.runner.spool import Spool
from slipstream.runner.unfinished import TurnKey, Unfinished

log = structlog.get_logger()


class TurnLog:
    """Of one attempt at a group."""

    def __init__(self, spool: Spool, name: str, unfinished: Unfinished | None = None) -> None:
        """`unfinished`: what an earlier process left of it."""
        self._spool = spool
        self._name = name
        self._kept = dict(unfinished.turns) if unfinished else {}
        self.taken_up = unfinished.resumed_count if unfinished else 0
        """How often it was begun before."""

    def recall(self, index: int, rollout: Rollout) -> bool:
        """Bring a rollout's turn to the end that is kept of it; false if there is none."""
        if not self._kept:
            return False
        data = self._kept.pop(_key(index, rollout), None)
        if data is None:
            return False
        rollout.recall(runner_pb2.RolloutRecord.FromString(data))
        telemetry.turns_recalled.inc()
        return True

    def keep(self, index: int, rollout: Rollout) -> None:
        """Keep the turn of a rollout, which has ended."""
        number, start, crc32 = _key(index, rollout)
        meta = {"kind": "turn", "index": number, "start": start, "crc32": crc32}
        self._spool.append(self._name, meta, rollout.ended_turn().SerializeToString())


def _key(index: int, rollout: Rollout) -> TurnKey:
    start = rollout.turn_start
    return index, start, zlib.crc32(array("i", rollout.token_ids[:start]).tobytes())
