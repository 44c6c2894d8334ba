"""The spool of rows is bounded."""

from __future__ import annotations

from slipstream.runner.spool import ENTRY_BYTES, Rows, Spool


def test_the_first_write_of_a_key_wins() -> None:
    spool = Spool(1000)
    spool.put("t/a", Rows(b"first"))
    spool.put("t/a", Rows(b"second, and longer"))
    assert spool.get("t/a") == Rows(b"first")
    assert (spool.size_bytes, len(spool)) == (ENTRY_BYTES + 5, 1)


def test_a_full_spool_says_so_and_drops_nothing() -> None:
    spool = Spool(2 * ENTRY_BYTES + 8)
    spool.put("a", Rows(b"1234"))
    assert not spool.full
    spool.put("b", Rows(b"56789"))
    assert spool.full
    assert spool.get("a") == Rows(b"1234")
    assert spool.release("a")
    assert not spool.full


def test_a_key_is_released_once() -> None:
    spool = Spool(8)
    spool.put("a", Rows(b"1234"))
    assert [spool.release("a"), spool.release("a"), spool.release("never")] == [True, False, False]
    assert (spool.get("a"), spool.size_bytes) == (None, 0)
