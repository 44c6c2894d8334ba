"""What the launcher writes when the disk is full, and how much of what processes print it keeps."""

from __future__ import annotations

import json
import sys
import time

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


def test_what_a_process_prints_is_kept_within_its_bound_while_it_goes_on(tmp_path):
    output = tmp_path / "runner-1.out"
    # The last line comes alone: what is printed between a copy and a cut may be lost.
    steps = "n < 99999 or time.sleep(0.5); print(n, flush=True); n % 500 or time.sleep(0.02)"
    program = f"import time\nfor n in range(100000): {steps}"
    spec = ProcessSpec("runner-1", (sys.executable, "-c", program), output, output)
    process = SupervisedProcess(spec)
    most = 0
    try:
        while process.exit_reason() is None:
            process.limit_output(4096, 1)
            most = max(most, sum(path.stat().st_size for path in tmp_path.iterdir()))
            time.sleep(0.005)
    finally:
        process.wait()
    process.limit_output(4096, 1)
    lines = b"".join(path.read_bytes() for path in (tmp_path / "runner-1.out.1", output)).splitlines()
    assert lines[-1] == b"99999"
    assert most < 100_000, "588,890 bytes were printed"
