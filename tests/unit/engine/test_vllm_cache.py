"""vLLM's cache events in the hashes of routers, and salts that end. Events are of the shapes that vLLM publishes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slipstream.engine.base import KvEvent
from slipstream.engine.hashing import block_hashes
from slipstream.engine.vllm import cache
from slipstream.engine.vllm.cache import CacheLedger, CacheNews

BLOCK = 4
TOKENS = list(range(100, 112))


@dataclass
class Stored:
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    extra_keys: list[Any]
    block_size: int = BLOCK
    group_idx: int = 0
    medium: str = "GPU"


@dataclass
class Removed:
    block_hashes: list[bytes]
    medium: str = "GPU"


@dataclass
class Cleared:
    nothing: list[int] = field(default_factory=list[int])


def first(salt: str) -> Stored:
    return Stored([b"a" + salt.encode(), b"b" + salt.encode()], None, TOKENS[:8], [(salt,), None])


def later(salt: str) -> Stored:
    return Stored([b"c" + salt.encode()], b"b" + salt.encode(), TOKENS[8:], [None])


def known(ledger: CacheLedger) -> set[int]:
    news = CacheNews()
    news.absorb({"dead_blocks": 0, "report": 0, "events": ledger.take()})
    held: set[int] = set()
    for event in news.drain_events():
        held = held | set(event.block_hashes) if event.kind == "stored" else held - set(event.block_hashes)
    return held


def test_stored_blocks_have_the_hashes_that_routers_compute():
    ledger = CacheLedger("GPU")
    ledger.absorb([first("x"), later("x"), first("y")])
    assert known(ledger) == {*block_hashes("x", TOKENS, BLOCK), *block_hashes("y", TOKENS[:8], BLOCK)}


def test_a_block_that_vllm_has_twice_is_gone_with_the_second():
    ledger = CacheLedger("GPU")
    ledger.absorb([first("x"), first("x"), Removed([b"bx"])])
    assert ledger.take() == [("stored", block_hashes("x", TOKENS[:8], BLOCK))]
    ledger.absorb([Removed([b"bx"])])
    assert ledger.take() == [("removed", block_hashes("x", TOKENS[:8], BLOCK)[1:])]


def test_other_tiers_and_unknown_blocks_are_left_out():
    ledger = CacheLedger("GPU")
    stored = first("x")
    stored.medium = "CPU"
    ledger.absorb([stored, later("x"), Removed([b"ax"])])
    assert ledger.take() == []


def test_cleared_stands_for_all_before_it():
    ledger = CacheLedger("GPU")
    ledger.absorb([first("x"), Cleared(), first("y")])
    assert [kind for kind, _ in ledger.take()] == ["cleared", "stored"]


def test_a_salt_that_ended_names_its_blocks_and_takes_no_more():
    ledger = CacheLedger("GPU")
    ledger.absorb([first("x"), first("y")])
    assert sorted(ledger.end("x")) == [(b"ax", 0), (b"bx", 0)]
    assert (ledger.ended("x"), ledger.ended("y"), ledger.ended(None)) == (True, False, False)
    ledger.absorb([Removed([b"ax"]), Removed([b"bx"]), later("x")])
    assert known(ledger) == set(block_hashes("y", TOKENS[:8], BLOCK))
    assert ledger.end("x") == []


def test_events_that_nobody_drained_are_replaced_by_the_whole(monkeypatch):
    monkeypatch.setattr(cache, "EVENT_LIMIT", 3)
    news = CacheNews()
    for number in range(9):
        news.absorb({"dead_blocks": number, "report": 0, "events": [("stored", [number])]})
    news.absorb({"dead_blocks": 7, "report": 4, "events": [("removed", [0])]})
    assert news.drain_events() == [KvEvent("cleared"), KvEvent("stored", tuple(range(1, 9)))]
    assert (news.drain_events(), news.dead_blocks, news.report_number) == ([], 7, 4)
