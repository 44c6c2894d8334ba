"""Runs from start to end, through all services: what they leave to look at is true."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections import Counter

import pytest
from rollout_traces import LIFE, check_lives, check_tree, names_of, spans_by_trace, trained
from run_process import DEADLINE_S, environment, steps_of

from slipstream.launcher.ports import read_endpoints
from slipstream.launcher.records import read_timeline
from slipstream.launcher.rundir import RunDir
from slipstream.launcher.trace import trace

# The first test waits for both runs.
pytestmark = pytest.mark.timeout(590, func_only=False)

REPORTED = {
    *("seed", "accuracy_before", "accuracy_after", "accuracy_by_environment", "wall_s", "steps", "lag_max"),
    *("lag_bound", "overlap_fraction", "mismatch_kl", "cached_token_fraction", "versions_applied"),
    *("rollouts_cancelled", "sandbox_executions"),
}

GROUP_SPANS = {
    *(("orchestrator", name) for name in ("group", "queue", "training")),
    *(("runner", name) for name in ("run", "turn", "place", "decode", "score", "environment_score")),
}
SERVED_SPANS = {("router", "Place"), ("decode", "Decode")}
"""What those answered whom the runner asked. Prefill workers may be left out of a turn, but not of all."""
PREFILL_SPANS = {("runner", "prefill"), ("prefill", "Prefill")}


def test_two_runs_side_by_side_finish_with_a_line_that_tells_the_outcome(finished):
    assert finished.exit_codes == [0, 0], finished.bounded.output + finished.synchronous.output
    for run, steps in ((finished.bounded, 8), (finished.synchronous, 4)):
        last = run.output.strip().splitlines()[-1]
        assert last.startswith(f"{run.path.name} finished: ")
        assert f"{steps} steps in " in last


def test_nothing_of_a_finished_run_is_left_running(finished):
    assert finished.bounded.left_after() == []
    assert finished.synchronous.left_after() == []


def test_a_run_without_a_prefill_pool_knows_all_routes_and_agrees_with_its_trainer(finished):
    report = finished.synchronous.report()
    assert not list((finished.synchronous.path / "logs").glob("prefill*"))
    assert report["routes_unknown_fraction"] == 0
    assert report["mismatch_numeric"] < 1e-9


def test_ranks_of_the_trainer_take_every_step_and_publish_every_version_together(finished):
    for rank in ("trainer", "trainer-1"):
        lines = (finished.synchronous.path / "timeline" / f"{rank}.jsonl").read_text().splitlines()
        kinds = Counter(json.loads(line)["kind"] for line in lines)
        assert (kinds["train_step"], kinds["publish"]) == (4, 5), rank


def test_what_a_run_has_stored_is_trained_once_more_by_the_trainer_alone(finished, tmp_path):
    recorded = finished.synchronous
    asked = ["-m", "slipstream.launcher", "rl", "--replay-rollouts", str(recorded.path), f"--run.directory={tmp_path}"]
    ended = subprocess.run(
        [sys.executable, *asked], env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    lines = (tmp_path / f"{recorded.path.name}-replay" / "metrics.jsonl").read_text().splitlines()
    again, then = [json.loads(line) for line in lines], recorded.metrics("step")
    assert [record["step"] for record in again] == [record["step"] for record in then]
    assert not any(record["sequences_lost"] for record in again)
    for name in ("loss", "grad_norm", "loss_tokens", "entropy"):  # of the same weights, which take the same routes
        assert again[0][name] == pytest.approx(then[0][name], rel=1e-3, abs=1e-5), name


def test_the_report_has_every_figure(finished):
    report = finished.bounded.report()
    assert report.keys() >= REPORTED
    assert [name for name in REPORTED if report[name] is None] == []
    assert report["state"] == "finished"
    assert report["steps"] == 8
    assert 8 <= report["versions_applied"] == len(finished.bounded.metrics("update"))
    assert report["accuracy_by_environment"]["letters"].keys() == {"before", "after", "count"}
    assert "<svg" in (finished.bounded.path / "report.html").read_text()


def test_each_trained_rollout_has_one_trace_of_its_own_from_its_dispatch_to_its_step(finished):
    lives = check_lives(finished.bounded)
    assert len(lives) == 8 * 4 * 4
    for name, spans in lives.items():
        check_tree(spans, name)
        (turn,) = (span for span in spans.values() if span["name"] == "turn")
        assert turn["links"], "the request was its group's"
        below = {span["name"] for span in spans.values() if span.get("parent") == turn["span"]}
        assert {"place", "decode"} <= below <= {"place", "prefill", "decode"}, name
        assert ("runner", "score") in names_of(spans), name
    assert any(("runner", "prefill") in names_of(spans) for spans in lives.values())
    decodes = [
        [span["end_s"] for span in spans.values() if span["name"] == "decode"][-1] for spans in lives.values()
    ]  # fmt: skip
    assert len(set(decodes)) > len(decodes) / 2, "the decode of each ends when its own sample does"


def test_what_the_rollouts_of_a_group_share_is_one_trace_across_the_services(finished):
    traces = spans_by_trace(finished.bounded)
    by_name = {
        f"{span['group_id']}.{span['attempt']}": trace for trace, of in traces.items() for span in of.values()
        if span["name"] == "group"
    }  # fmt: skip
    groups = trained(finished.bounded)
    assert len(groups) == 8 * 4
    seen: set[tuple[str, str]] = set()
    for name in groups:
        found = traces[by_name[name]]
        roots = [span for span in found.values() if "parent" not in span]
        assert [(span["name"], span["outcome"]) for span in roots] == [("group", "finished")], name
        assert all(span["parent"] in found for span in found.values() if span is not roots[0]), name
        names = names_of(found)
        assert names >= GROUP_SPANS | SERVED_SPANS, name
        seen |= names
        served = [
            span
            for span in found.values()
            if (span["service"], span["name"]) in SERVED_SPANS | {("prefill", "Prefill")}
        ]
        assert all(found[span["parent"]]["name"] == span["name"].lower() for span in served), name
    assert seen >= PREFILL_SPANS
    assert {"PublishShard", "SealVersion"} <= {name for spans in traces.values() for _, name in names_of(spans)}


def test_the_trace_of_a_rollout_is_found_by_its_name_and_written_alone(finished, tmp_path):
    copied = shutil.copytree(finished.bounded.path, tmp_path / "copied")
    shown = finished.bounded.slipstream("rollouts", str(copied), "--outcome", "trained", "--limit", "1", "--json")
    record = json.loads(shown.stdout)
    one = finished.bounded.slipstream("rollouts", str(copied), "--show", record["rollout"])
    assert f"trace       {record['trace_id']}\n" in one.stdout
    assert trace([str(copied), "--rollout", record["rollout"]]) == 0
    written = json.loads((copied / "trace.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in written if event["name"] == "thread_name"}
    of_it = [event for event in written if event["ph"] == "X" and event["args"]["trace"] == record["trace_id"]]
    assert {event["name"] for event in of_it} >= {name for _, name in LIFE}
    assert {rows[event["tid"]] for event in of_it} == {record["rollout"]}, "one row: nothing of one turn overlaps"
    assert {"train_step", "group", "Decode"} <= {event["name"] for event in written}, "and what it is linked to"


def test_a_run_becomes_one_trace_file(finished, capsys):
    by_itself = finished.bounded.path / "trace.json"
    assert json.loads(by_itself.read_text())["traceEvents"]
    assert trace([str(finished.bounded.path)]) == 0
    written = json.loads(by_itself.read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in written if event["name"] == "process_name"}
    services = {"orchestrator", "router", "runner-1", "prefill-1", "decode-1", "trainer"}
    assert {"rollouts", *services} <= set(processes.values())
    assert {event["ph"] for event in written} == {"M", "X", "s", "f"}
    assert "A row for each rollout that it trained" in (finished.bounded.path / "report.html").read_text()


def test_a_run_without_tracing_writes_no_spans(finished):
    assert read_timeline(finished.synchronous.path / "timeline")[1] == {}


def test_no_step_trains_a_group_beyond_the_bound(finished):
    for run, bound in ((finished.bounded, 2), (finished.synchronous, 0)):
        sealed = [record for record in run.journal() if record["kind"] == "sealed"]
        lags = [record["step"] - 1 - dispatched for record in sealed for dispatched in record["dispatch_steps"]]
        assert max(lags) == max(record["lag_max"] for record in run.metrics("step"))
        assert max(lags) <= bound


def test_a_rollout_never_goes_back_to_older_weights(finished):
    rollouts = finished.bounded.rollouts()
    assert rollouts
    for rollout in rollouts:
        steps = steps_of(rollout)
        assert all(earlier <= later for earlier, later in itertools.pairwise(steps)), rollout
        assert steps[0] >= int(rollout["dispatch_version"].partition(".")[2]), rollout


def test_with_a_bound_of_zero_nothing_crosses_an_update(finished):
    run = finished.synchronous
    steps = trained(run)
    seen = 0
    for rollout in run.rollouts():
        step = steps[f"{rollout['group_id']}.{rollout['attempt']}"]
        assert rollout["dispatch_version"] == f"1.{step - 1}"
        assert steps_of(rollout) == [step - 1]
        seen += 1
    assert seen == 4 * 4 * 4
    assert all(record["in_flight_samples"] == 0 for record in run.metrics("update"))


def test_runs_side_by_side_share_nothing(finished):
    first, second = (
        {
            address
            for table in ("endpoints", "metrics")
            for address in read_endpoints(run.endpoints_file, table).values()
        }
        for run in (RunDir(finished.bounded.path), RunDir(finished.synchronous.path))
    )
    assert first
    assert not first & second
    for run in (finished.bounded, finished.synchronous):
        assert run.metrics("cancelled") == [] or run is finished.bounded
        assert run.events("service_died") == []
