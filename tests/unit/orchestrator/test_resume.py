"""What a process of the orchestrator makes of the journal that it finds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.algorithms.staleness import AgeOut
from slipstream.api.rollout.v1 import rollout_pb2
from slipstream.common.config import ConfigError
from slipstream.common.errors import JournalCorrupt
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator import replay as replay_module
from slipstream.orchestrator.config import EnvironmentConfig, OrchestratorConfig, WorkerConfig
from slipstream.orchestrator.durations import Durations
from slipstream.orchestrator.journal import Journal
from slipstream.orchestrator.ledger import Asked
from slipstream.orchestrator.metrics import MetricsFile
from slipstream.orchestrator.replay import KEPT_SESSIONS, History, replay
from slipstream.orchestrator.resume import earlier_history
from slipstream.orchestrator.run_state import RunState
from slipstream.orchestrator.session_history import KeptSession
from slipstream.orchestrator.summary import summary_of


@pytest.fixture
def found(make_config: Callable[..., OrchestratorConfig], tmp_path: Path) -> Callable[..., History | None]:
    """What is made of a journal with these records, by a run with seed 0."""

    def find(*records: dict[str, Any], first: int = 0) -> History | None:
        config = make_config(
            OrchestratorConfig,
            environments=[EnvironmentConfig(name="words")],
            workers=[WorkerConfig(replica="decode-1", role="decode", address="127.0.0.1:1")],
            broadcaster="127.0.0.1:2",
        )
        path = tmp_path / "journal" / "journal.jsonl"
        journal = Journal(path)
        for record in records:
            journal.append(**record)
        journal.close()
        if first:
            path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[first:]))
        journal = Journal(path)
        try:
            return earlier_history(journal, config)
        finally:
            journal.close()

    return find


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    return {"kind": "run", "run_id": tmp_path.name, "seed": 0}


SERVED = {"kind": "serving", "version": "1.0"}
ACQUIRED = {"kind": "acquired", "position": 0, "attempt": 1, "version": "1.0", "runner": "runner-1"}


def test_an_empty_journal_is_that_of_a_run_that_begins(found) -> None:
    assert found() is None


def test_evaluations_that_are_done_are_known_and_the_beginnings_of_others_counted(found, run) -> None:
    begun, ended = {"kind": "evaluating", "name": "before"}, {"kind": "evaluated", "name": "before", "step": 0}
    history = found(
        run, begun, begun, {**ended, "results": [["words", 0.5, 4]]}, {"kind": "evaluating", "name": "step-2"}
    )
    assert [(r.environment, r.accuracy, r.problem_count, r.step) for r in history.accuracies["before"]] == [
        ("words", 0.5, 4, 0)
    ]
    assert history.evaluation_starts == Counter({"before": 2, "step-2": 1})


def test_a_run_that_failed_may_go_on_and_one_that_finished_has_ended(found, run) -> None:
    end = {"kind": "run_ended", "reason": "no runner reported for 20 s"}
    assert found(run, {**end, "state": "failed"}).ended == "failed"
    resumed = {**run, "kind": "resumed"}
    assert found(resumed).ended == ""
    history = found({**end, "state": "finished"}, resumed)
    assert (history.ended, history.reason) == ("finished", "no runner reported for 20 s")


def test_the_sessions_of_an_outside_agent_are_known_for_such(found, run) -> None:
    history = found(run, SERVED, {**ACQUIRED, "sessions": True}, {**ACQUIRED, "position": 1})
    assert [history.dispatches[position].sessions for position in (0, 1)] == [True, False]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (ACQUIRED, "attempt 1 comes after 1, which is running"),
        ({"kind": "reported", "position": 0, "attempt": 2}, "attempt 2 at position 0 is not open"),
        ({"kind": "lost", "position": 1, "attempt": 1, "counted": True}, "position 1 has ended"),
        ({"kind": "ended", "position": 0, "attempt": 1, "outcome": "eaten"}, "'eaten' is not a valid Outcome"),
        ({"kind": "sealed", "step": 2, "positions": [0], "attempts": [1]}, "step 0 was sealed last"),
        ({"kind": "trained", "step": 1, "totals": {}}, "step 0 was trained last, and 0 sealed"),
        ({"kind": "lost", "position": 0}, "'attempt'"),
    ],
)
def test_a_record_that_cannot_follow_is_named(found, run, record: dict[str, Any], says: str) -> None:
    with pytest.raises(JournalCorrupt, match=r"record 3 of the journal, .* does not follow") as caught:
        found(run, SERVED, ACQUIRED, record)
    assert caught.value.message.endswith(says)
    assert "journal.jsonl: " in caught.value.message


def test_the_journal_of_another_run_is_refused(found, run) -> None:
    with pytest.raises(ConfigError, match="is the journal of run other with seed 0: take another directory"):
        found({**run, "run_id": "other"})


def test_how_long_groups_and_steps_took_is_known_unless_nobody_measured_it(found, run) -> None:
    records = [
        {**run, "time_s": 0.0},
        {**SERVED, "time_s": 0.0},
        *({**ACQUIRED, "position": position, "time_s": 1.0} for position in range(4)),
        {"kind": "reported", "position": 0, "attempt": 1, "time_s": 4.0},
        {"kind": "regenerated", "position": 1, "attempt": 1, "time_s": 6.0},
        {"kind": "sealed", "step": 1, "positions": [0], "attempts": [1], "plans": [], "figures": {}, "time_s": 6.0},
        {"kind": "trained", "step": 1, "totals": {}, "time_s": 7.0},
        {"kind": "ended", "position": 2, "attempt": 1, "outcome": "filtered", "time_s": 8.0},
        {"kind": "sealed", "step": 2, "positions": [], "attempts": [], "plans": [], "figures": {}, "time_s": 9.0},
        {"kind": "skipped", "step": 2, "totals": {}, "time_s": 10.0},
        {**run, "kind": "resumed", "time_s": 1000.0},
        {"kind": "reported", "position": 3, "attempt": 1, "time_s": 1001.0},
        {"kind": "sealed", "step": 3, "positions": [], "attempts": [], "plans": [], "figures": {}, "time_s": 1001.0},
        {"kind": "skipped", "step": 3, "totals": {}, "time_s": 1002.0},
    ]
    history = found(*records)
    assert history.durations == {"words": [[3.0, 3.0], [None, 5.0], [7.0, 7.0]]}
    assert (history.step_times_s, history.skipped_in_a_row) == ([3.0], 2)


def test_what_was_backed_off_is_known_with_its_last_pause(found, run) -> None:
    said = {"kind": "backed_off", "environment": "words", "pause_s": 1.0}
    history = found(run, said, {**said, "environment": "other"}, {**said, "pause_s": 2.0})
    assert {name: record["pause_s"] for name, record in history.backed_off.items()} == {"words": 2.0, "other": 1.0}
    assert found({"kind": "healed", "environment": "words"}).backed_off.keys() == {"other"}


def test_what_a_run_failed_by_is_forgotten_when_it_is_started_again(found, run) -> None:
    said = {"kind": "backed_off", "environment": "words", "pause_s": 1.0}
    history = found(run, said, {"kind": "run_ended", "state": "failed", "reason": "words"})
    assert (history.ended, history.backed_off.keys()) == ("failed", {"words"})
    history = found({**run, "kind": "resumed"})
    assert (history.ended, history.backed_off) == ("", {})


def test_groups_cut_off_as_surplus_say_nothing_of_how_long_an_environment_takes(tmp_path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", lambda: 0.0)
    state = RunState("r", 1, metrics)
    known = {"words": [[2.0, 2.0]] * 10 + [[None, 5.0]] * 10}
    for surplus, p90_s in ((False, (math.inf, 5.0)), (True, (2.0, 2.0))):
        durations = Durations({"words": AgeOut.REGENERATE}, 2, state, lambda: 0.0)
        durations.restore(known, [], surplus=surplus)
        assert durations.p90_s("words") == p90_s
    metrics.close()


def test_of_third_parties_groups_those_that_ended_last_are_kept(found, run, monkeypatch) -> None:
    monkeypatch.setattr(replay_module, "KEPT_EXTERNAL", 2)
    said = {"kind": "external", "attempts": 0, "lost": 0, "request_id": ""}
    opened = [{**said, "group": name, "rollout": "", "request": "asked"} for name in "abcd"]
    ended = [{**said, "group": name, "rollout": "answered"} for name in "dcb"]
    history = found(run, *opened, *ended)
    assert history.external.keys() == {"a", "b", "c"}
    assert history.external["a"]["request"] == "asked"
    assert found({**ended[0], "group": "a"}).external.keys() == {"a", "b"}


def test_a_summary_stands_for_the_records_before_it(found, run) -> None:
    whole = found(run, SERVED, ACQUIRED, {**ACQUIRED, "position": 1}, {"kind": "reported", "position": 1, "attempt": 1})
    lost = {"kind": "lost", "position": 0, "attempt": 1, "counted": True}
    records = ({"kind": "summary", **summary_of(whole)}, {**run, "kind": "resumed"}, lost)
    history = found(*records, first=5)
    assert {position: group.phase for position, group in history.groups.items()} == {0: "waiting", 1: "scored"}
    assert (history.groups[0].losses, history.dispatches[1].runner_id) == (1, "runner-1")
    assert (history.serving, history.next_position) == (PolicyVersion(1, 0), 2)


def test_a_summary_whose_plans_are_gone_is_refused(found, run) -> None:
    whole = found(run, SERVED, ACQUIRED)
    with pytest.raises(JournalCorrupt, match="step 1 is sealed, and its plan is gone"):
        found({"kind": "summary", **summary_of(whole), "sealed_step": 1}, first=3)


def test_a_journal_without_its_beginning_is_refused(found, run) -> None:
    with pytest.raises(ConfigError, match="begins with record 1, which is no summary"):
        found(run, SERVED, ACQUIRED, first=1)


def test_sessions_are_known_as_they_were_last_in_a_summary_too_and_of_ended_ones_the_newest(found, run) -> None:
    def record(number: int, state: rollout_pb2.SessionState) -> dict[str, Any]:
        proto = rollout_pb2.Session(session_id=f"session-{number}-0", state=state, position=number)
        kept = KeptSession(
            proto, bytes([number % 256]) * 32, number, 1, "here:1", None, Asked(f"ask-{number}", b"body"), b"n"
        )
        return {"kind": "session", **kept.as_record()}

    opened = [record(number, rollout_pb2.SESSION_STATE_OPEN) for number in range(3)]
    ended = [record(number, rollout_pb2.SESSION_STATE_ENDED) for number in range(1, KEPT_SESSIONS + 2)]
    history = found(run, *opened, *ended)
    assert [history.sessions[name].proto.state for name in ("session-0-0", "session-2-0")] == [1, 4]
    assert len(history.sessions) == 1 + KEPT_SESSIONS
    assert "session-1-0" not in history.sessions
    again = replay([{"kind": "summary", **summary_of(history)}], lambda position: "words")
    assert again.sessions == history.sessions
