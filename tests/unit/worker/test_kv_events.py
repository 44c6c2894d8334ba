"""What followers of the cache hear."""

from __future__ import annotations

import struct

from slipstream.engine.base import KvEvent
from slipstream.engine.worker import kv_events
from slipstream.engine.worker.kv_events import KvEventLog


def unpacked(events: bytes) -> list[tuple[int, ...]]:
    return list(struct.iter_unpack("<BQ", events))


def test_a_follower_first_hears_all_that_is_held_and_then_what_changes():
    log = KvEventLog()
    log.absorb([KvEvent("stored", (1, 2, 2**64 - 1)), KvEvent("removed", (2,))])
    with log.follower() as follower:
        log.absorb([KvEvent("stored", (7,))])
        events, reset = log.take(follower)
        assert (unpacked(events), reset) == ([(1, 1), (1, 2**64 - 1), (1, 7)], True)
        log.absorb([KvEvent("removed", (1,)), KvEvent("cleared"), KvEvent("stored", (8,))])
        events, reset = log.take(follower)
        assert (unpacked(events), reset) == ([(2, 1), (3, 0), (1, 8)], False)
        assert log.take(follower) == (b"", False)


def test_a_follower_that_falls_behind_is_told_the_whole_again(monkeypatch):
    monkeypatch.setattr(kv_events, "MAX_PENDING_BYTES", 18)
    log = KvEventLog()
    with log.follower() as follower:
        log.take(follower)
        for block_hash in (1, 2, 3):
            log.absorb([KvEvent("stored", (block_hash,))])
        log.absorb([KvEvent("removed", (1,))])
        events, reset = log.take(follower)
        assert (unpacked(events), reset) == ([(1, 2), (1, 3)], True)
