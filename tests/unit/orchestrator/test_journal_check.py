"""The program that says whether a journal keeps the promises, against journals that break each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.orchestrator.journal import Journal
from slipstream.orchestrator.journal_check import Violation, check_records, main


def acquired(position: int, attempt: int = 1, version: str = "1.0") -> dict[str, Any]:
    return {"kind": "acquired", "position": position, "attempt": attempt, "version": version, "runner": "runner-1"}


def reported(position: int, attempt: int = 1) -> dict[str, Any]:
    return {"kind": "reported", "position": position, "attempt": attempt}


def lost(position: int, attempt: int = 1) -> dict[str, Any]:
    return {"kind": "lost", "position": position, "attempt": attempt}


def ended(position: int, attempt: int = 1, outcome: str = "filtered") -> dict[str, Any]:
    return {"kind": "ended", "position": position, "attempt": attempt, "outcome": outcome}


def sealed(step: int, *attempts: tuple[int, int]) -> dict[str, Any]:
    return {"kind": "sealed", "step": step, "positions": [p for p, _ in attempts], "attempts": [a for _, a in attempts]}


def trained(step: int, incarnation: int = 1, kind: str = "trained") -> dict[str, Any]:
    return {"kind": kind, "step": step, "incarnation": incarnation}


def restored(incarnation: int, step: int) -> dict[str, Any]:
    return {"kind": "restored", "incarnation": incarnation, "step": step}


RUN = {"kind": "run", "max_off_policy_steps": 1}
RESUMED = {"kind": "resumed", "max_off_policy_steps": 1}
SERVED = {"kind": "serving", "version": "1.0"}
FINISHED = {"kind": "run_ended", "state": "finished", "reason": ""}

BEGUN = [RUN, SERVED, acquired(0), acquired(1), acquired(2), reported(0), reported(1)]
"""Two groups are ready, one runs."""
ONE_STEP = [*BEGUN, sealed(1, (0, 1), (1, 1)), trained(1)]


def numbered(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"n": number, **record} for number, record in enumerate(records)]


def test_a_run_that_was_killed_and_restored_and_took_a_step_again_keeps_the_promises() -> None:
    records = [
        *ONE_STEP,
        RESUMED,
        lost(2),
        restored(2, 0),
        trained(1, 2, "retrained"),
        {"kind": "serving", "version": "2.1"},
        acquired(2, 2, "2.1"),
        reported(2, 2),
        acquired(3, 1, "2.1"),
        ended(3),
        sealed(2, (2, 2)),
        trained(2, 2, "skipped"),
        FINISHED,
    ]
    checked = check_records(numbered(records))
    figures = checked.figures()
    assert (figures["positions"], figures["frontier"], figures["trained"], figures["skipped"]) == (4, 4, 2, 1)
    assert (figures["filtered"], figures["attempts"], figures["lost"], figures["steps taken again"]) == (1, 5, 1, 1)
    assert figures["processes of the orchestrator"] == 2
    assert checked.trained == {0, 1, 2}
    check_records(numbered(records), prefix=3)


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([RUN, acquired(0)], "dispatched at 1.0, with none served"),
        ([RUN, SERVED, acquired(0, version="1.1")], "dispatched at 1.1, with 1.0 served"),
        ([*BEGUN, RESUMED, lost(2), acquired(2, 2)], "dispatched at 1.0, with none served"),
        ([RUN, SERVED, acquired(1), ended(1), FINISHED], "the run finished, and position 0 has no outcome"),
        ([RUN, SERVED, acquired(1), acquired(0, 2)], "attempt 2 at position 0 comes after 0"),
        ([*BEGUN, acquired(2, 2)], "another attempt at position 2 is open"),
        ([*BEGUN, lost(2), acquired(2, 1)], "attempt 1 at position 2 comes after 1"),
        ([*BEGUN, lost(2), acquired(2, 3)], "attempt 3 at position 2 comes after 1"),
        ([*BEGUN, lost(2), lost(2)], "attempt 1 at position 2 is not open"),
        ([*BEGUN, reported(2, 2)], "attempt 2 at position 2 is not open"),
        ([*BEGUN, ended(2), ended(2, outcome="failed")], "position 2 ended before: filtered"),
        ([*BEGUN, ended(2, 2)], "no such attempt at position 2"),
        ([*BEGUN, ended(2), acquired(2, 2)], "position 2 had ended"),
        ([*ONE_STEP, ended(0)], "position 0 is sealed in step 1"),
        ([*ONE_STEP, acquired(0, 2)], "position 0 had ended"),
        ([*BEGUN, ended(0), sealed(1, (0, 1))], "position 0 ended before: filtered"),
        ([*ONE_STEP, sealed(2, (1, 1))], "position 1 is sealed in step 1 as well"),
        ([*BEGUN, lost(2), sealed(1, (2, 1))], "attempt 1 at position 2 is not open"),
        ([*BEGUN, sealed(2, (0, 1))], "step 0 was sealed last"),
        ([*BEGUN, *(sealed(step + 1, (step, 1)) for step in range(3))], "position 2 lags 2 versions"),
        ([*BEGUN, trained(1)], "step 1 is not sealed"),
        ([*ONE_STEP, trained(1)], "step 1 is trained already on this lineage"),
        ([*ONE_STEP, trained(1, 1, "retrained")], "step 1 is trained already on this lineage"),
        ([*BEGUN, sealed(1, (0, 1)), sealed(2, (1, 1)), trained(2)], "step 0 was trained last on this lineage"),
        ([*ONE_STEP, restored(2, 0), trained(1, 1, "retrained")], "incarnation 2 trains"),
        ([*ONE_STEP, restored(1, 0)], "incarnation 1 trains already"),
        ([*ONE_STEP, restored(2, 2)], "step 1 is the last that this lineage has trained"),
        ([*ONE_STEP, FINISHED], "the run finished, and position 2 has no outcome"),
        ([*ONE_STEP, FINISHED, RESUMED], "the run finished, and position 2 has no outcome"),
        ([*ONE_STEP, ended(2), restored(2, 0), FINISHED], "the run finished, and position 0 has no outcome"),
    ],
)
def test_each_broken_promise_is_named(records: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(Violation, match=says):
        check_records(numbered(records))


@pytest.mark.parametrize(("prefix", "says"), [(3, "not trained: positions"), (1, "trained beyond the first 1")])
def test_the_trained_set_can_be_asked_for(prefix: int, says: str) -> None:
    check_records(numbered(ONE_STEP), prefix=2)
    with pytest.raises(Violation, match=says):
        check_records(numbered(ONE_STEP), prefix)


def test_without_its_beginning_nothing_is_claimed() -> None:
    with pytest.raises(Violation, match="does not say what came before"):
        check_records(numbered(ONE_STEP)[1:])


SUMMARY = {
    **{"kind": "summary", "bound": 1, "incarnation": 1, "serving": "1.0", "next_position": 3},
    **{"sealed_step": 1, "lineage_step": 1, "outcomes": {"trained": 2}},
    "groups": [{"position": 2, "phase": "running", "attempt": 1, "sealed_step": None, "version": "1.0"}],
}
"""Of ONE_STEP."""


def test_a_summary_stands_for_what_was_dropped_and_agrees_with_what_was_not() -> None:
    rest = [SUMMARY, RESUMED, lost(2), SERVED, acquired(2, 2), ended(2, 2), FINISHED]
    whole = check_records(numbered([*ONE_STEP, *rest]))
    left = check_records(numbered([*ONE_STEP, *rest])[len(ONE_STEP) :], prefix=2)
    figures = left.figures()
    assert {name: figures[name] for name in ("positions", "frontier", "trained", "filtered", "first record")} == {
        **{"positions": 3, "frontier": 3, "trained": 2, "filtered": 1},
        "first record": len(ONE_STEP),
    }
    assert (whole.frontier, whole.trained_step, whole.attempts[2]) == (3, 1, 2)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"next_position": 4}, "next_position is 4, and 3 by the records before it"),
        ({"lineage_step": 0}, "lineage_step is 0, and 1"),
        ({"outcomes": {"trained": 1}}, "1 positions have ended and 1 are open, of 3"),
        ({"outcomes": {"trained": 1, "filtered": 1}}, "1 positions filtered, not 0"),
        ({"groups": [{**SUMMARY["groups"][0], "attempt": 2}]}, "attempt 2 at position 2 is not open"),
    ],
)
def test_a_summary_that_contradicts_the_records_before_it_is_named(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(Violation, match=says):
        check_records(numbered([*ONE_STEP, {**SUMMARY, **changed}]))


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (acquired(0, 2), "position 0 had ended"),
        (acquired(2, 2), "another attempt at position 2 is open"),
        (ended(1), "no such attempt at position 1"),
        (sealed(2, (1, 1)), "attempt 1 at position 1 is not open"),
        (trained(1), "step 1 is trained already"),
    ],
)
def test_after_a_summary_nothing_ends_twice_either(record: dict[str, Any], says: str) -> None:
    with pytest.raises(Violation, match=says):
        check_records(numbered([*ONE_STEP, SUMMARY, record])[len(ONE_STEP) :])


def test_positions_that_ended_before_a_summary_count_as_trained_only_if_all_of_them_were() -> None:
    filtered = {**SUMMARY, "outcomes": {"trained": 1, "filtered": 1}}
    with pytest.raises(Violation, match="not trained: positions"):
        check_records(numbered([*ONE_STEP, filtered])[len(ONE_STEP) :], prefix=2)


def written(run: Path, records: list[dict[str, Any]]) -> Path:
    journal = Journal(run / "journal" / "journal.jsonl")
    for record in records:
        journal.append(**record)
    journal.close()
    return run


def test_the_program_says_in_its_exit_code_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(written(tmp_path / "good", [*ONE_STEP, ended(2), FINISHED])), "--prefix", "2"]) == 0
    assert "trained                                  2" in capsys.readouterr().out
    assert main([str(written(tmp_path / "bad", [*ONE_STEP, trained(1)]))]) == 1
    assert "record 9 (trained): step 1 is trained already" in capsys.readouterr().err
    path = tmp_path / "bad" / "journal" / "journal.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"1.0"', b'"1.1"'))
    assert main([str(tmp_path / "bad")]) == 2
    assert f"{path}: line 1 does not match its checksum" in capsys.readouterr().err
    assert main([]) == 2
