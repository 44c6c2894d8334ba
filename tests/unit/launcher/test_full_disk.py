"""What the launcher writes when the disk is full, and how much of what processes print it keeps."""

from __future__ import annotations

import json
import os
import sys

import pytest

from slipstream.launcher.process import ProcessSpec, SupervisedProcess
from slipstream.launcher.report import write_report
from slipstream.launcher.rundir import RunDir


def test_events_wait_for_room(small_disk):
    disk = small_disk(64 * 1024)
    run = RunDir(disk.path)
    run.record("run_started")
    disk.fill()
    for number in range(200):
        run.record("service_died", number=number)
    run.write_waiting()
    disk.free()
    run.write_waiting()
    run.record("run_ended")
    events = [json.loads(line) for line in run.events_file.read_text().splitlines()]
    assert [event.get("number") for event in events] == [None, *range(200), None]


def test_a_report_that_finds_no_room_leaves_nothing_behind(synthetic_run, small_disk):
    disk = small_disk(256 * 1024)
    run = RunDir(disk.path)
    for name in ("metrics.jsonl", "config.toml"):
        (run.path / name).write_bytes((synthetic_run.path / name).read_bytes())
    before = set(run.path.iterdir())
    disk.fill()
    with pytest.raises(OSError, match="No space left"):
        write_report(run)
    assert {path.name for path in set(run.path.iterdir()) - before} <= {"filler", "report.json"}
    disk.free()
    write_report(run)
    assert (run.path / "report.html").stat().st_size > 0


PORTIONS = 200
PRINTS = """
import sys
with open(sys.argv[1], "rb", buffering=0) as asked, open(sys.argv[2], "wb", buffering=0) as told:
    while asked.read(1) == b".":
        for n in range(500):
            print(10000 + n, flush=True)
        told.write(b".")
    print("the end")
"""
"""500 lines each time that it is asked for them, and one that comes alone."""


def test_what_a_process_prints_is_kept_within_its_bound_while_it_goes_on(tmp_path):
    directory, pipes = tmp_path / "logs", [tmp_path / "ask", tmp_path / "tell"]
    directory.mkdir()
    output = directory / "runner-1.out"
    for pipe in pipes:
        os.mkfifo(pipe)
    command = (sys.executable, "-c", PRINTS, *map(str, pipes))
    process = SupervisedProcess(ProcessSpec("runner-1", command, output, output))
    most = 0
    try:
        with pipes[0].open("wb", buffering=0) as ask, pipes[1].open("rb", buffering=0) as told:
            for _ in range(PORTIONS):
                ask.write(b".")
                process.limit_output(4096, 1)  # while it prints
                assert told.read(1), "it has ended"
                most = max(most, sum(path.stat().st_size for path in directory.iterdir()))
            process.limit_output(4096, 1)  # what is printed between a copy and a cut may be lost
            ask.write(b"!")
    finally:
        process.wait()
    process.limit_output(4096, 1)
    lines = b"".join(path.read_bytes() for path in (directory / "runner-1.out.1", output)).splitlines()
    assert lines[-1] == b"the end"
    assert most < 4 * 4096, "600,000 bytes were printed"
