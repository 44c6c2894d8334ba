"""A journal whose process is killed at any moment, most of all as it begins another file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from counted import Counted

from slipstream.common.errors import JournalCorrupt
from slipstream.orchestrator.journal import Journal, read_journal, segments

CALLS = ("open", "write", "rename", "ftruncate", "fsync", "unlink", "close")
"""What a journal asks of the kernel."""
LIMIT_BYTES = 1600
APPENDED = 8
"""Enough for two segments."""


class Killed(BaseException):
    """The process is no more."""


class Kills:
    """Counts what is asked of the kernel, and does not do the `at`-th call, nor any after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, at: int, *, torn: bool = False) -> None:
        self.count = 0
        self.done: list[str] = []
        """The names that files got, and when those were put on disk."""
        self._at = at
        self._torn = torn
        self._directory = str(directory)
        for name in CALLS:
            monkeypatch.setattr(os, name, self._guarded(name, getattr(os, name)))

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(first: Any, *rest: Any, **named: Any) -> Any:
            if not self._ours(first):
                return call(first, *rest, **named)
            self.count += 1
            if self.count >= self._at:
                if name == "write" and self._torn and self.count == self._at:
                    call(first, rest[0][: len(rest[0]) // 2])
                raise Killed
            if name == "rename" or (name == "fsync" and os.path.isdir(f"/proc/self/fd/{first}")):
                self.done.append(name)
            return call(first, *rest, **named)

        return guarded

    def _ours(self, of: Any) -> bool:
        try:
            return str(os.readlink(f"/proc/self/fd/{of}") if isinstance(of, int) else of).startswith(self._directory)
        except OSError:
            return False


async def write_until_killed(path: Path) -> list[int]:
    """Append records, all synced; the steps of those that are on disk."""
    synced: list[int] = []
    try:
        journal = Journal(path, LIMIT_BYTES)
        journal.summarizer = Counted()
        for step in range(APPENDED):
            journal.append("trained", step=step, padding="x" * 60)
            await journal.sync()
            synced.append(step)
        journal.close()
    except Killed:
        pass
    return synced


async def calls_of_a_whole_journal(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Kills:
    with monkeypatch.context() as patched:
        kills = Kills(patched, directory, at=1 << 30)
        assert await write_until_killed(directory / "journal.jsonl") == list(range(APPENDED))
    assert len(segments(directory / "journal.jsonl")) > 2
    return kills


def steps_of(records: list[dict[str, Any]]) -> list[int]:
    return [record["step"] for record in records if record["kind"] == "trained"]


@pytest.mark.parametrize("torn", [False, True], ids=["before a call", "in a write"])
async def test_whenever_it_is_killed_the_next_process_goes_on_by_itself(tmp_path, monkeypatch, torn: bool) -> None:
    last = (await calls_of_a_whole_journal(tmp_path / "whole", monkeypatch)).count
    between_names = 0
    for at in range(1, last + 1):
        path = tmp_path / str(at) / "journal.jsonl"
        path.parent.mkdir()
        with monkeypatch.context() as patched:
            Kills(patched, path.parent, at, torn=torn)
            synced = await write_until_killed(path)
        between_names += any(path.parent.glob("journal-*")) and not path.exists()
        told = steps_of(read_journal(path).records) if segments(path)[-1].exists() else []
        again = Journal(path, LIMIT_BYTES)
        again.summarizer = counted = Counted()
        records = again.take_recovered()
        counted.count = len(steps_of(records))
        kept = steps_of(records)
        assert kept == told == list(range(len(kept))), "read or taken up, none is there twice and none is missing"
        assert len(synced) <= len(kept) <= len(synced) + 1, "all that is synced, and perhaps what was on its way there"
        again.append("resumed")
        await again.sync()
        again.close()
        after = read_journal(path).records
        assert [record["n"] for record in after] == list(range(len(after)))
        assert steps_of(after) == kept
        assert not path.with_suffix(".new").exists()
        for segment in segments(path)[1:]:
            assert b'"kind":"summary"' in segment.read_bytes().splitlines()[0], "each stands for all before it"
    assert between_names >= 2, "of two switches at least"


async def test_an_outage_never_leaves_the_name_of_the_next_file_without_that_of_the_one_before(tmp_path, monkeypatch):
    kills = await calls_of_a_whole_journal(tmp_path / "whole", monkeypatch)
    switches = "".join({"rename": "r", "fsync": "s"}[name] for name in kills.done)
    assert switches == "rsrs" * switches.count("rsrs")
    assert switches


async def test_a_newest_file_that_is_lost_is_told_apart_from_one_that_has_no_name_yet(tmp_path, monkeypatch) -> None:
    await calls_of_a_whole_journal(tmp_path, monkeypatch)
    path = tmp_path / "journal.jsonl"
    path.unlink()
    with pytest.raises(JournalCorrupt, match="the newest part of the journal, is missing"):
        Journal(path)
    assert not path.exists()
