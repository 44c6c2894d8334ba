"""Runs that `slipstream rl --resume` does not go on with, and what it says of each."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.launcher import resume, rl
from slipstream.launcher.cli import main
from slipstream.launcher.config import RunConfig
from slipstream.launcher.errors import RunDirError
from slipstream.launcher.ports import (
    LOOPBACK,
    PortLease,
    assign_endpoints,
    port_of,
    read_endpoints,
    take_ports,
    write_endpoints,
)
from slipstream.launcher.resume import Resumable, earlier_s, find_resumable, make_ready, moved_metrics, told
from slipstream.launcher.rundir import RunDir, RunLock
from slipstream.orchestrator.journal import Journal

CHECKPOINTS = "[trainer.checkpoint]\ninterval_steps = 2\n"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunDir]:
    """A run of that configuration, whose journal has a beginning and perhaps an end."""
    monkeypatch.chdir(tmp_path)

    def make(
        config: str = CHECKPOINTS, *, journal: bool = True, state: str = "", reason: str = "", told_again: bool = False
    ) -> RunDir:
        run = RunDir(tmp_path / "runs" / "demo")
        run.path.mkdir(parents=True)
        run.config_file.write_text(config)
        if journal:
            records = Journal(run.path / "journal" / "journal.jsonl")
            records.append("run", run_id="demo", seed=0)
            if state:
                records.append("run_ended", state=state, reason=reason)
            if told_again:
                records.append("resumed", run_id="demo", seed=0)
            records.close()
        return run

    return make


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["rl", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("state", ["", "failed"])
def test_a_run_that_was_stopped_killed_or_failed_may_go_on(made, state: str) -> None:
    run = made(state=state)
    assert find_resumable(["--resume", "demo"]).run == run
    assert find_resumable(["--resume"]).run.path.resolve() == run.path.resolve(), "the newest one"


@pytest.mark.parametrize("state", ["finished", "stopped"])
@pytest.mark.parametrize("told_again", [False, True])
def test_a_run_that_has_ended_for_good_is_refused_with_its_reason(made, capsys, state: str, told_again: bool) -> None:
    """`told_again`: its orchestrator died once more, and came back to say so."""
    made(state=state, reason="all 8 steps are trained", told_again=told_again)
    said = refusal(capsys, "--resume", "demo")
    assert said == "error: demo has ended for good: all 8 steps are trained; its report is in runs/demo\n"


def test_a_run_that_has_finished_names_the_weights_that_another_may_start_from(made, capsys) -> None:
    run = made(state="finished", reason="all 8 steps are trained")
    (run.path / "checkpoints" / "final").mkdir(parents=True)
    further = "a new run goes on from its weights: --trainer.initial-model runs/demo/checkpoints/final\n"
    assert refusal(capsys, "--resume", "demo").endswith(further)


def test_a_run_that_goes_on_says_from_where_and_counts_the_time_before(made) -> None:
    run = made()
    journal = Journal(run.path / "journal" / "journal.jsonl")
    for kind, step in (("trained", 1), ("checkpoint", 1), ("trained", 2), ("trained", 3)):
        journal.append(kind, step=step)
    journal.close()
    run.config_file.write_text(f"{CHECKPOINTS}[orchestrator]\ntotal_steps = 9\n")
    sentence = "going on from step 1 of 9, that of its last checkpoint; steps 2 to 3 are taken once more"
    assert told(find_resumable(["--resume", "demo"])) == (1, sentence)
    for step, rest in ((2, "; step 3 is taken once more"), (3, "")):
        newest = run.path / "checkpoints" / f"1.{step}"
        newest.mkdir(parents=True)
        (newest / "COMPLETE").touch()
        sentence = f"going on from step {step} of 9, that of its last checkpoint{rest}"
        assert told(find_resumable(["--resume", "demo"])) == (step, sentence), "the journal had not heard of it"
    events = [("run_started", 10.0), ("service_died", 14.0), ("run_started", 100.0), ("run_ended", 103.0)]
    lines = [f'{{"kind": "{kind}", "time_s": {time_s}}}\n' for kind, time_s in events]
    run.events_file.write_text("".join(lines))
    assert earlier_s(run) == 7.0


def test_a_moved_run_is_judged_by_where_it_is(made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(CHECKPOINTS + "[run]\ndirectory = '/proc/gone'\n[[environments]]\ntype = 'spell_backward'\n")
    begun: list[tuple[Path, RunDir]] = []

    def begin(config: RunConfig, *, stay_up: bool, resumed: Resumable) -> int:
        begun.append((config.run.directory, resumed.run))
        return 0

    monkeypatch.setattr(rl, "run_rl", begin)
    with pytest.raises(SystemExit) as ended:
        main(["rl", "--resume", str(run.path)])
    assert ended.value.code == 0
    assert begun == [(tmp_path / "runs", run)]


def test_a_journal_that_knows_less_than_the_newest_checkpoint_is_not_gone_on_with(made, capsys) -> None:
    run = made()
    newest = run.path / "checkpoints" / "1.20"
    newest.mkdir(parents=True)
    (newest / "COMPLETE").touch()
    with pytest.raises(RunDirError, match="its newest checkpoint is of step 20, and its journal ends at step 0"):
        told(find_resumable(["--resume", "demo"]))
    journal = run.path / "journal" / "journal.jsonl"
    journal.rename(journal.with_name("journal-000000000000.jsonl"))
    assert "journal.jsonl, the newest part of its journal, is missing" in refusal(capsys, "--resume", "demo")


def test_a_run_that_was_killed_as_its_journal_began_another_file_goes_on(made) -> None:
    run = made()
    journal = run.path / "journal" / "journal.jsonl"
    journal.rename(journal.with_name("journal-000000000000.jsonl"))
    journal.with_suffix(".new").touch()
    assert find_resumable(["--resume", "demo"]).run == run
    records = Journal(journal)
    assert [record["kind"] for record in records.take_recovered()] == ["run"]
    records.close()
    assert sorted(file.name for file in journal.parent.iterdir()) == ["journal-000000000000.jsonl", "journal.jsonl"]


def test_without_checkpoints_there_are_no_weights_to_go_on_from(made, capsys) -> None:
    made("[trainer.checkpoint]\ninterval_steps = 0\n")
    assert "demo writes no checkpoints (trainer.checkpoint.interval_steps is 0)" in refusal(capsys, "--resume", "demo")


def test_a_run_that_is_up_is_refused(made, capsys) -> None:
    lock = RunLock(made())
    try:
        assert refusal(capsys, "--resume", "demo") == "error: demo is running\n"
    finally:
        lock.release()


def test_a_run_without_a_journal_or_with_a_changed_one_is_refused(made, capsys) -> None:
    run = made(journal=False)
    assert "demo never came to begin: it has no journal" in refusal(capsys, "--resume", "demo")
    journal = Journal(run.path / "journal" / "journal.jsonl")
    journal.append("run", run_id="demo", seed=0)
    journal.append("serving", version="1.0")
    journal.close()
    journal.path.write_bytes(journal.path.read_bytes().replace(b'"1.0"', b'"1.1"'))
    said = refusal(capsys, "--resume", "demo")
    assert said == f"error: demo cannot go on: {journal.path}: line 1 does not match its checksum\n"


def test_other_settings_are_no_part_of_it(made, capsys) -> None:
    made()
    said = refusal(capsys, "--resume", "demo", "@", "x")
    assert "usage: slipstream rl --resume RUN, not demo @ x; the run goes on with" in said
    assert "no run called other" in refusal(capsys, "--resume", "other")


def test_of_a_run_and_its_copy_that_go_on_at_once_one_is_refused_and_keeps_its_addresses(
    made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "PORTS_TIMEOUT_S", 0.2)
    run = made()
    locks = tmp_path / "locks"
    first = PortLease(locks)
    assign_endpoints(run.endpoints_file, ["orchestrator", "decode-1"], first)
    first.close()
    copy = RunDir(run.path.with_name("copy"))
    shutil.copytree(run.path, copy.path)
    before = copy.endpoints_file.read_text()

    lease, other = PortLease(locks, str(run.path)), PortLease(locks, str(copy.path))
    make_ready(run, lease)
    with pytest.raises(RunDirError) as refused:
        make_ready(copy, other)
    assert f"copy cannot go on: {read_endpoints(run.endpoints_file)['orchestrator']} is taken, " in str(refused.value)
    assert f"probably by {run.path}: of a run and its copies one can be up" in str(refused.value)
    assert assign_endpoints(run.endpoints_file, ["orchestrator", "decode-1"], lease)[0] == read_endpoints(
        copy.endpoints_file
    )
    assert copy.endpoints_file.read_text() == before
    lease.close()
    make_ready(copy, other)
    other.close()


def with_metrics(run: RunDir, locks: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Addresses of its services and of their metrics, as an earlier launch left them."""
    lease = PortLease(locks)
    assigned = assign_endpoints(run.endpoints_file, ["orchestrator", "decode-1"], lease, metrics=True)
    lease.close()
    return assigned


def test_metrics_of_a_run_that_goes_on_are_where_they_were_as_soon_as_its_dead_processes_are_gone(
    made, tmp_path: Path
) -> None:
    run = made()
    before = with_metrics(run, tmp_path / "locks")
    lease = PortLease(tmp_path / "locks")
    with socket.socket() as dying:
        dying.bind((LOOPBACK, port_of(before[1]["decode-1"])))
        dying.listen()
        gone = threading.Timer(0.5, dying.close)
        gone.start()
        make_ready(run, lease)
    assert assign_endpoints(run.endpoints_file, ["orchestrator", "decode-1"], lease, metrics=True) == before
    assert moved_metrics(before[1], before[1], run.targets_file) == ""


def test_agents_find_the_gateway_of_a_run_that_goes_on_where_it_was(
    made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "PORTS_TIMEOUT_S", 0.2)
    run = made()
    locks, file, replicas = tmp_path / "locks", run.endpoints_file, ["orchestrator", "gateway"]
    first = PortLease(locks)
    endpoints, _ = assign_endpoints(file, replicas, first)
    http = take_ports(["trainer", "gateway"], first)["gateway"]
    write_endpoints(file, endpoints, {}, {"gateway": http})
    first.close()

    lease = PortLease(locks)
    make_ready(run, lease)
    assert assign_endpoints(file, replicas, lease)[0] == endpoints
    taken = take_ports(["trainer", "gateway"], lease, read_endpoints(file, "agents"))
    assert taken["gateway"] == http
    assert taken["trainer"] not in (http, *endpoints.values())
    lease.close()

    with socket.socket() as other:
        other.bind((LOOPBACK, port_of(http)))
        other.listen()
        with pytest.raises(RunDirError, match=f"{http} is taken, which is the address of its gateway"):
            make_ready(run, PortLease(locks))


def test_metrics_whose_port_another_has_are_moved_and_that_is_said(
    made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "PORTS_TIMEOUT_S", 0.2)
    run = made()
    before = with_metrics(run, tmp_path / "locks")
    lease = PortLease(tmp_path / "locks")
    with socket.socket() as other:
        other.bind((LOOPBACK, port_of(before[1]["decode-1"])))
        other.listen()
        make_ready(run, lease)
        after = assign_endpoints(run.endpoints_file, ["orchestrator", "decode-1"], lease, metrics=True)
    assert after[0] == before[0]
    assert after[1]["orchestrator"] == before[1]["orchestrator"]
    assert moved_metrics(before[1], after[1], run.targets_file) == (
        f"metrics moved, as their ports are taken: decode-1 from {before[1]['decode-1']} to {after[1]['decode-1']}; "
        f"runs/demo/prometheus_targets.json has the new ones"
    )
    many = {f"decode-{number}": f"{LOOPBACK}:{number}" for number in range(1, 9)}
    moved = moved_metrics(many, dict.fromkeys(many, f"{LOOPBACK}:99"), run.targets_file)
    assert "decode-3 from 127.0.0.1:3 to 127.0.0.1:99, and 5 more; " in moved


def test_a_secret_of_sessions_that_is_no_file_is_told_before_anything_starts(made, capsys) -> None:
    (made().path / "session-secret").mkdir()
    said = refusal(capsys, "--resume", "demo")
    assert said == "error: demo cannot go on: runs/demo/session-secret, the secret of sessions' keys, is no file\n"
