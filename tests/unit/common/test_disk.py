"""Files on a disk that fills up, and files that somebody removes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from slipstream.common.disk import AppendFile, LogFile, PatientFile, name_directory, replace_file, with_older
from slipstream.common.errors import DiskFull, TooManyFiles
from slipstream.common.timeline import TimelineFile

LINE = b"x" * 999 + b"\n"


def fill(file: AppendFile, record: bytes = LINE) -> int:
    """Append records until one does not fit; how many did."""
    count = 0
    while True:
        try:
            file.append(record)
        except DiskFull:
            return count
        count += 1


def test_a_record_that_does_not_fit_leaves_nothing_behind_and_fits_later(small_disk):
    disk = small_disk(64 * 1024)
    disk.fill(left_bytes=8192)
    file = AppendFile(disk.path / "a.jsonl")
    count = fill(file)
    assert count == 8
    assert (disk.path / "a.jsonl").read_bytes() == LINE * count
    disk.free()
    file.append(LINE)
    file.close()
    assert (disk.path / "a.jsonl").read_bytes() == LINE * (count + 1)


def test_a_record_of_several_pages_is_taken_back_whole(small_disk):
    disk = small_disk(64 * 1024)
    file = AppendFile(disk.path / "a.jsonl")
    file.append(b"first\n")
    with pytest.raises(DiskFull):
        file.append(b"y" * (128 * 1024) + b"\n")
    file.append(b"second\n")
    file.close()
    assert (disk.path / "a.jsonl").read_bytes() == b"first\nsecond\n"


def test_a_timeline_says_that_its_disk_is_full_and_when_it_goes_on(small_disk):
    disk = small_disk(64 * 1024)
    file = TimelineFile(disk.path / "a.jsonl")
    file.record("step", 1.0, 2.0)
    disk.fill()
    with capture_logs() as said:
        for _ in range(400):  # beyond its last page
            file.record("step", 2.0, 3.0, loss=0.5)
        disk.free()
        file.record("step", 3.0, 4.0)
    file.close()
    assert [each["event"] for each in said] == ["timeline_waits_for_room", "timeline_goes_on"]
    assert len((disk.path / "a.jsonl").read_text().splitlines()) == 402


def test_records_wait_in_order_for_room_and_only_beyond_the_buffer_are_they_dropped(small_disk):
    disk = small_disk(64 * 1024)
    patient = PatientFile(AppendFile(disk.path / "a.jsonl"), buffer_bytes=3 * len(b"record 0\n"))
    patient.write(b"before\n")
    disk.fill()
    fill(patient.file, b".")  # the rest of its last page
    held = (disk.path / "a.jsonl").read_bytes()
    for number in range(5):
        patient.write(b"record %d\n" % number)
    assert patient.stuck
    assert not patient.flush()
    assert patient.dropped_count == 2
    disk.free()
    assert patient.flush()
    patient.write(b"after\n")
    patient.close()
    assert (disk.path / "a.jsonl").read_bytes() == held + b"record 0\nrecord 1\nrecord 2\nafter\n"


def test_a_file_or_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "timeline" / "a.jsonl")
    file.append(b"1\n")
    (tmp_path / "timeline" / "a.jsonl").unlink()
    (tmp_path / "timeline").rmdir()
    file.append(b"2\n")
    file.close()
    assert (tmp_path / "timeline" / "a.jsonl").read_bytes() == b"2\n"


def test_a_full_file_becomes_an_older_one_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    file = AppendFile(path, limit_bytes=20, kept_files=2)
    for number in range(10):
        file.append(b"line %d...\n" % number)
    file.close()
    assert [older.name for older in with_older(path)] == ["a.log.2", "a.log.1", "a.log"]
    assert b"".join(older.read_bytes() for older in with_older(path)).splitlines()[-1] == b"line 9..."
    assert sum(older.stat().st_size for older in tmp_path.iterdir()) <= 3 * 20


def test_two_writers_of_a_file_both_follow_when_one_moves_it(tmp_path: Path) -> None:
    one, other = (AppendFile(tmp_path / "a.log", limit_bytes=30, kept_files=9) for _ in range(2))
    for number in range(6):
        one.append(b"one %d......\n" % number)
        other.append(b"other %d....\n" % number)
    lines = b"".join(path.read_bytes() for path in with_older(tmp_path / "a.log")).splitlines()
    assert len(lines) == len(set(lines)) == 12
    one.close()
    other.close()


def test_a_whole_file_is_replaced_or_left_as_it_was(small_disk):
    disk = small_disk(64 * 1024)
    path = disk.path / "model.safetensors"
    replace_file(path, b"old")
    with pytest.raises(DiskFull) as refused:
        replace_file(path, bytes(128 * 1024))
    assert refused.value.metadata == {"path": str(path)}
    assert path.read_bytes() == b"old"
    assert list(disk.path.iterdir()) == [path]
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_directory_is_on_disk_before_it_has_its_name_and_its_name_is_after(tmp_path: Path, monkeypatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        events.append("renamed")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    made, named = tmp_path / ".making", tmp_path / "made"
    made.mkdir()
    replace_file(made / "a", b"a")
    name_directory(made, named)
    assert (named / "a").read_bytes() == b"a"
    assert events == [f"{made}/a.new", str(made), str(made), "renamed", str(tmp_path)]


def test_log_lines_that_find_no_room_are_counted_and_never_raised(small_disk):
    disk = small_disk(64 * 1024)
    log = LogFile(disk.path / "a.log", limit_bytes=1 << 20, kept_files=1)
    log.write("before\n")
    disk.fill()
    for _ in range(5000):
        log.write("lost or not\n")
    lost = log.dropped_count
    assert lost > 0
    disk.free()
    log.write("after\n")
    lines = (disk.path / "a.log").read_text().splitlines()
    assert set(lines[1:-2]) == {"lost or not"}
    assert lines[-2:] == [f'{{"event":"log_lines_dropped","level":"warning","count":{lost}}}', "after"]


def test_where_no_more_files_may_be_open_records_wait_as_for_room_and_the_limit_is_named(open_files, tmp_path):
    file = PatientFile(AppendFile(tmp_path / "a.jsonl"), 4096)
    limit = open_files.exhaust()
    file.write(b"1\n")
    assert file.stuck
    with pytest.raises(TooManyFiles, match="ulimit -n") as caught:
        replace_file(tmp_path / "b.json", b"{}")
    assert caught.value.metadata == {"path": str(tmp_path / "b.json"), "limit": str(limit)}
    open_files.free()
    file.write(b"2\n")
    file.close()
    assert (tmp_path / "a.jsonl").read_bytes() == b"1\n2\n"
    assert not (tmp_path / "b.json.new").exists()
