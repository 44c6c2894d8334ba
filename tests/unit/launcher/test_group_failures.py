"""Groups that fail are told of, in the progress and in the report."""

from __future__ import annotations

import json

from slipstream.launcher.progress import GroupFailures
from slipstream.launcher.records import read_run
from slipstream.launcher.report import build_report, write_report
from slipstream.launcher.rundir import RunDir

FIRST = "the last with ZeroDivisionError: division by zero; traceback in logs/runner-1.log"


def failure(number: int, ended: int, environment: str = "rise") -> str:
    record = {"kind": "group_failed", "time_s": 1.0, "environment": environment, "group_id": f"train-{number}",
              "reason": "ENVIRONMENT_ERROR", "detail": "ZeroDivisionError: division by zero", "runner": "runner-1",
              "groups_failed": number, "groups_ended": ended}  # fmt: skip
    return json.dumps(record, separators=(",", ":")) + "\n"


def test_the_first_failure_is_told_and_then_many_more_but_not_each(tmp_path):
    path = tmp_path / "metrics.jsonl"
    failures = GroupFailures(path)
    assert failures.news() == []  # the orchestrator has written nothing yet
    told = []
    with path.open("a") as file:
        for number in range(1, 17):
            file.write('{"kind":"step","step":1}\n' + failure(number, 3 * number))
            file.flush()
            told += failures.news()
    assert told == [f"{n} of {3 * n} groups of 'rise' failed, {FIRST}" for n in (1, 4, 16)]


def test_a_half_written_failure_is_told_once_it_is_whole(tmp_path):
    path, line = tmp_path / "metrics.jsonl", failure(1, 2)
    failures = GroupFailures(path)
    path.write_text(line[:30])
    assert failures.news() == []
    path.write_text(line)
    assert failures.news() == [f"1 of 2 groups of 'rise' failed, {FIRST}"]
    path.write_text("")  # the file reached its bound
    assert failures.news() == []
    path.write_text(failure(1, 5, "fall"))
    assert failures.news() == [f"1 of 5 groups of 'fall' failed, {FIRST}"]


def test_the_report_counts_failed_groups_by_environment(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(failure(1, 2) + failure(2, 4) + failure(1, 9, "fall"))
    report = build_report(read_run(RunDir(tmp_path)))
    assert report["groups_failed"] == 3
    assert report["groups_failed_by_environment"] == {"rise": 2, "fall": 1}
    page = write_report(RunDir(tmp_path)).read_text()
    assert "failed: rise" in page
    assert "failed: fall" in page
