"""The journal against torn tails and changed bytes."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from counted import Counted
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.errors import DiskFull, JournalCorrupt
from slipstream.orchestrator.journal import Journal, read_journal, segments
from slipstream.orchestrator.journal_text import PORTION, large_line_of, line_of


def written(path: Path, count: int = 5) -> Path:
    journal = Journal(path)
    for step in range(count):
        journal.append("sealed", step=step, positions=[step, step + 1])
    journal.close()
    return path


def test_what_was_appended_is_read_back_in_order(tmp_path: Path) -> None:
    recovered = read_journal(written(tmp_path / "journal"))
    assert [record["step"] for record in recovered.records] == list(range(5))
    assert recovered.cut_bytes == 0


def test_each_record_tells_when_it_was_appended(tmp_path: Path) -> None:
    before_s = time.time()
    times_s = [record["time_s"] for record in read_journal(written(tmp_path / "journal")).records]
    assert times_s == sorted(times_s)
    assert before_s - 1e-3 <= times_s[0] <= times_s[-1] <= time.time() + 1e-3


@pytest.mark.parametrize("lost", [1, 7, 30])
def test_a_torn_tail_is_cut_off_and_reported_and_the_journal_goes_on(tmp_path: Path, lost: int) -> None:
    path = written(tmp_path / "journal")
    data = path.read_bytes()
    path.write_bytes(data[:-lost])
    journal = Journal(path)
    assert len(journal.recovered.records) == 4
    assert journal.recovered.cut_bytes == len(data.splitlines(keepends=True)[-1]) - lost
    journal.append("sealed", step=9)
    journal.close()
    assert [record["step"] for record in read_journal(path).records] == [0, 1, 2, 3, 9]


def test_a_flipped_byte_anywhere_before_the_last_line_end_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "journal", 2)
    data = path.read_bytes()
    for offset in range(len(data) - 1):
        changed = bytearray(data)
        changed[offset] ^= 0x01
        path.write_bytes(changed)
        with pytest.raises(JournalCorrupt):
            Journal(path)
        assert path.read_bytes() == changed, "a refused journal is left as it is"


def test_a_record_taken_out_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "journal")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    with pytest.raises(JournalCorrupt, match="missing"):
        read_journal(path)


async def test_sync_covers_everything_appended_before_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append("sealed", step=1)
    await journal.sync()
    await journal.sync()
    journal.close()
    assert len(read_journal(journal.path).records) == 1


async def test_records_wait_for_room_on_a_full_disk_and_sync_says_so(small_disk) -> None:
    disk = small_disk(64 * 1024)
    journal = Journal(disk.path / "journal.jsonl")
    journal.append("run")
    await journal.sync()
    disk.fill()
    for step in range(200):
        journal.append("sealed", step=step)
    assert journal.stuck
    with pytest.raises(DiskFull):
        await journal.sync()
    whole = read_journal(journal.path)  # whoever looks meanwhile sees whole records
    assert whole.cut_bytes == 0
    assert len(whole.records) < 201
    disk.free()
    await journal.sync()
    assert (journal.stuck, journal.waiting_bytes) == (False, 0)
    journal.close()
    assert [record.get("step") for record in read_journal(journal.path).records] == [None, *range(200)]


async def test_the_oldest_segments_go_once_their_positions_have_ended(tmp_path: Path) -> None:
    ended = 0
    limit_bytes = 16_384
    journal = Journal(tmp_path / "journal.jsonl", limit_bytes, lambda: ended)
    for position in range(600):
        journal.append("acquired", position=position)
        await journal.sync()
    kept = [record["n"] for record in read_journal(journal.path).records]
    assert kept == list(range(600)), "an open position keeps all"
    ended = 590
    for position in range(600, 1200):
        journal.append("acquired", position=position)
        await journal.sync()
    journal.close()
    kept = [record["n"] for record in read_journal(journal.path).records]
    assert kept[0] < 590
    assert kept == list(range(kept[0], 1200))

    ended = 1200
    bounded = Journal(tmp_path / "bounded" / "journal.jsonl", limit_bytes, lambda: ended)
    for position in range(1200):
        bounded.append("acquired", position=position)
        await bounded.sync()
        assert sum(file.stat().st_size for file in segments(bounded.path)) <= limit_bytes + 200
    bounded.close()
    assert 0 < read_journal(bounded.path).records[0]["n"] < 1200


async def test_each_segment_begins_with_a_summary_of_those_before_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", 4096)
    journal.summarizer = Counted()
    for position in range(100):
        journal.append("acquired", position=position)
        await journal.sync()
    journal.close()
    _, *later = segments(journal.path)
    assert len(later) > 4
    assert b'"kind":"summary"' not in segments(journal.path)[0].read_bytes()
    for path in later:
        assert [b'"kind":"summary"' in line for line in path.read_bytes().splitlines()].index(True) == 0
    records = read_journal(journal.path).records
    for index, record in enumerate(records):
        if record["kind"] == "summary":
            assert record["count"] == sum(each["kind"] == "acquired" for each in records[:index])


@pytest.mark.parametrize("torn_bytes", [0, 1, 40], ids=["before its head", "at its end", "in it"])
async def test_a_file_whose_head_a_crash_took_gets_one_before_anything_else(tmp_path: Path, torn_bytes: int) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, 1024)
    journal.summarizer = Counted()
    while len(segments(path)) == 1:
        journal.append("acquired", position=0)
        await journal.sync()
    journal.close()
    path.write_bytes(path.read_bytes()[:-torn_bytes] if torn_bytes else b"")
    again = Journal(path, 1024)
    again.summarizer = Counted()
    again.append("resumed")
    again.close()
    assert [record["kind"] for record in read_journal(path).records][-2:] == ["summary", "resumed"]


class Slow(Counted):
    """Takes its time, in a thread of its own, until it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.let_go = threading.Event(), threading.Event()

    def fields(self) -> dict[str, Any]:
        self.asked.set()
        assert self.let_go.wait(30)
        return super().fields()


async def begun_summary(journal: Journal) -> asyncio.Task[None]:
    """Append and sync until a summary is being made."""
    assert isinstance(journal.summarizer, Slow)
    while True:
        journal.append("acquired", position=0)
        syncing = asyncio.create_task(journal.sync())
        while not syncing.done():
            if journal.summarizer.asked.is_set():
                return syncing
            await asyncio.sleep(0)


async def test_what_is_appended_while_a_summary_is_made_comes_after_it_and_is_synced_with_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", 4096)
    journal.summarizer = slow = Slow()
    first = await begun_summary(journal)
    before = slow.count
    for position in range(3):
        journal.append("late", position=position)
    assert slow.count == before, "the summary must know nothing of them"
    later = asyncio.create_task(journal.sync())
    await asyncio.sleep(0.05)
    assert not later.done()
    slow.let_go.set()
    async with asyncio.timeout(30):
        await asyncio.gather(first, later)
    assert slow.count == before + 3
    journal.close()
    whole = read_journal(journal.path).records
    assert [record["n"] for record in whole] == list(range(len(whole)))
    assert [record["kind"] for record in whole][-4:] == ["summary", "late", "late", "late"]
    assert whole[-4]["count"] == before
    assert whole[-3]["time_s"] <= whole[-4]["time_s"] + 30, "each has the time at which it was appended"


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_a_summary_that_is_given_up_takes_no_record_with_it(tmp_path: Path, how: str) -> None:
    journal = Journal(tmp_path / "journal.jsonl", 4096)
    journal.summarizer = slow = Slow()
    making = await begun_summary(journal)
    count = slow.count
    journal.append("late", position=1)
    if how == "cancelled":
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        slow.let_go.set()
        async with asyncio.timeout(30):
            await journal.sync()
        journal.append("later", position=2)
    journal.close()
    making.cancel()
    slow.let_go.set()
    await asyncio.gather(making, return_exceptions=True)
    kinds = [record["kind"] for record in read_journal(journal.path).records if record["kind"] != "summary"]
    assert kinds == ["acquired"] * count + (["late", "later"] if how == "cancelled" else ["late"])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), VALUES, max_size=6), st.integers(0, 3 * PORTION))
def test_a_large_record_is_the_same_line_in_whatever_portions(record: dict[str, Any], count: int) -> None:
    large = {**record, "list": [[n, str(n)] for n in range(count)], "dict": {str(n): {"n": n} for n in range(count)}}
    assert large_line_of(large) == line_of(large)
    assert large_line_of({}) == line_of({})
