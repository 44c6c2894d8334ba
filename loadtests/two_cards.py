"""One `slipstream rl`, its figures as they come, and a time after which it is ended with what it has.

    PYTHONPATH=examples python loadtests/two_cards.py --json run.jsonl --limit-s 200 --runs DIR @ examples/h200-x2.toml

    ... --bounds 0,4 --train-s 50 @ examples/h200-x2.toml @ loadtests/async_vs_sync_cards.toml

Appends a line of JSON for the start (`up_s`), for each step, for each update of an engine, and one
`summary` at the end: steps, wall and trained tokens a second over all steps but the first, lag, mismatch in its parts,
pause, and how the run ended. Of a run that fails, the last lines of every log that speaks of an error are printed. Ends
with the run's own exit code, or 124 after `--limit-s` or `--train-s`.

With `--bounds` one run after another, each with another `orchestrator.max_off_policy_steps` (0 is synchronous), and a
line `comparison`: what each trains a second, and how many times as much as the first. What a run had trained when its
time was over counts, so the end at the limit is no failure there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from slipstream.launcher.child import guarded
from slipstream.launcher.records import read_json_lines

ROOT = Path(__file__).resolve().parent.parent
WRONG = re.compile(r'"level": "(error|warning)"|Traceback|Error:|ERROR')
POLL_S = 0.5
STOP_S = 25.0
STEP_FIELDS = (
    *("step", "time_s", "loss_tokens", "tokens", "step_s", "train_s", "fetch_s", "wait_s", "export_s", "publish_s"),
    *("published_bytes", "forward_s", "backward_s", "optimizer_s", "loss", "grad_norm", "lag_mean", "lag_max"),
    *("mismatch_kl", "mismatch_numeric", "mismatch_policy_lag", "mismatch_stale_kv", "tokens_pure_fraction"),
    *("tokens_policy_lag_fraction", "tokens_stale_kv_fraction", "ratio_p999", "routes_unknown_fraction"),
    *("pure_max_abs_diff", "replay_off_kl", "replay_on_kl", "routes_flipped_fraction", "tokens_per_s", "mfu"),
)
UPDATE_FIELDS = (
    *("version", "time_s", "replica", "pause_s", "apply_s", "verify_s", "total_s", "in_flight_samples"),
    "probe_max_abs_error",
)
MEANS = ("lag_mean", "mismatch_kl", "mismatch_numeric", "mismatch_policy_lag", "mismatch_stale_kv", "train_s",
         "publish_s", "export_s", "fetch_s", "wait_s")  # fmt: skip


class Watched:
    """A run under way."""

    def __init__(self, directory: Path, out: Path) -> None:
        self.directory = directory
        self._out = out
        self._seen = 0
        self.steps: list[dict[str, Any]] = []
        self.updates: list[dict[str, Any]] = []
        self.began_s = time.time()
        self.up_s: float | None = None
        """When training began, Unix time."""

    def note(self, kind: str, **values: Any) -> None:
        with self._out.open("a") as out:
            out.write(json.dumps({"kind": kind, **values}) + "\n")

    def look(self) -> None:
        """Write down what is new in the run's records."""
        records = list(read_json_lines(self.directory / "metrics.jsonl"))
        for record in records[self._seen :]:
            if record["kind"] == "phase" and record["phase"] == "training":
                self.up_s = record["time_s"]
                self.note("up", up_s=round(record["time_s"] - self.began_s, 1))
            elif record["kind"] == "step":
                self.steps.append(picked(record, STEP_FIELDS))
                self.note("step", **self.steps[-1])
            elif record["kind"] == "update":
                self.updates.append(picked(record, UPDATE_FIELDS))
                self.note("update", **self.updates[-1])
        self._seen = len(records)

    def trained_for(self, train_s: float | None) -> bool:
        """Whether that time has passed since training began."""
        return None not in (self.up_s, train_s) and time.time() > (self.up_s or 0.0) + (train_s or 0.0)

    def summary(self, ended: str) -> dict[str, Any]:
        """Of all steps but the first, whose kernels are compiled."""
        summary: dict[str, Any] = {"ended": ended, "steps": len(self.steps), "updates": len(self.updates)}
        summary["wall_s"] = round(time.time() - self.began_s, 1)
        if len(self.steps) > 1:
            first, *rest = self.steps
            span_s = rest[-1]["time_s"] - first["time_s"]
            summary["steps_per_s"] = len(rest) / span_s
            summary["trained_tokens_per_s"] = sum(step["loss_tokens"] for step in rest) / span_s
            summary["lag_max"] = max(step["lag_max"] for step in self.steps)
            summary |= {name: fmean(step[name] for step in rest if name in step) for name in MEANS if name in rest[-1]}
            summary["published_bytes"] = rest[-1]["published_bytes"]
        if self.updates:
            summary["pause_s_median"] = median(update["pause_s"] for update in self.updates)
            summary["in_flight_max"] = max(update["in_flight_samples"] for update in self.updates)
        return summary


def picked(record: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: record[name] for name in names if name in record}


def compare(arguments: list[str], options: argparse.Namespace) -> int:
    """The same run with one staleness bound after another."""
    bounds: list[int] = options.bounds
    found: dict[int, Watched] = {}
    for bound in bounds:
        words = [*arguments, "--orchestrator.max-off-policy-steps", str(bound)]
        code, found[bound] = run(words, options, f"bound-{bound}-{os.getpid()}")
        if code not in (0, 124):
            return code
    values = comparison(found)
    found[bounds[-1]].note("comparison", **values)
    print(json.dumps(values, indent=1), flush=True)
    return 0 if values["times_the_first"] else 1


def comparison(found: Mapping[int, Watched]) -> dict[str, dict[int, float]]:
    """What each run trained a second, by its bound, and as a multiple of the first."""
    speeds = {bound: watched.summary("").get("trained_tokens_per_s", 0.0) for bound, watched in found.items()}
    first = next(iter(speeds.values()))
    return {
        "trained_tokens_per_s": speeds,
        "times_the_first": {bound: speed / first for bound, speed in speeds.items()} if first else {},
    }


def run(arguments: list[str], options: argparse.Namespace, name: str) -> tuple[int, Watched]:
    """The run to its end, or to the limit; the code to end with, and what there is of it."""
    runs: Path = options.runs
    words = ("rl", *arguments, "--run.directory", str(runs), "--run.name", name)
    path = os.pathsep.join([str(ROOT / "services"), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        guarded((sys.executable, "-m", "slipstream.launcher", *words)),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    watched = Watched(runs / name, options.json)
    watched.note("run", arguments=arguments, time_s=watched.began_s)
    deadline_s = time.monotonic() + options.limit_s
    while process.poll() is None and time.monotonic() < deadline_s and not watched.trained_for(options.train_s):
        time.sleep(POLL_S)
        watched.look()
    ended = "limit" if process.poll() is None else f"exit code {process.returncode}"
    failed = process.poll() not in (None, 0)
    end(process)
    watched.look()
    summary = watched.summary(ended)
    watched.note("summary", **summary)
    print(json.dumps(summary, indent=1), flush=True)
    if failed or not watched.steps:
        print_errors(runs / name / "logs")
    return 124 if ended == "limit" else process.returncode, watched


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop the launcher, which ends what it started, and dies with us in any case."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGUSR1)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def print_errors(logs: Path) -> None:
    for log in sorted(logs.glob("*")):
        lines = log.read_text(errors="replace").splitlines()
        wrong = [line for line in lines if WRONG.search(line)]
        for line in [*wrong[-4:], *lines[-3:]]:
            print(f"{log.name}: {line[:400]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=200.0, help="of a run, its start included")
    parser.add_argument("--train-s", type=float, help="of a run, from the beginning of its training")
    parser.add_argument("--runs", type=Path, required=True, help="where its directory is made")
    parser.add_argument("--bounds", type=lambda text: [int(each) for each in text.split(",")], default=[])
    options, rest = parser.parse_known_args()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.runs.mkdir(parents=True, exist_ok=True)
    if options.bounds:
        return compare(rest, options)
    return run(rest, options, f"run-{os.getpid()}")[0]


if __name__ == "__main__":
    sys.exit(main())
