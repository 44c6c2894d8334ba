"""`report.json` and `report.html` of a run, made from its directory alone."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slipstream.launcher.intervals import intersection, total_s, union
from slipstream.launcher.metrics_records import worked_s
from slipstream.launcher.records import Record, RunRecords, read_run
from slipstream.launcher.report_html import render_html
from slipstream.launcher.report_rollouts import extremes_of
from slipstream.launcher.rollouts import annotated
from slipstream.launcher.rundir import RunDir

MISMATCH_PARTS = ("mismatch_kl", "mismatch_numeric", "mismatch_policy_lag", "mismatch_stale_kv")
REPLAY_KINDS = ("numeric", "policy_lag", "stale_kv")
"""Kinds of tokens, by what their context was computed with."""
REPLAY_WEIGHT = "replay_check_tokens"

ENDED_STATES = ("finished", "failed", "stopped")
SIGNAL_EXIT_CODE = 128


def write_report(run: RunDir) -> Path:
    """Rebuild both files; returns the path of the HTML."""
    records = read_run(run)
    report = build_report(records)
    _replace(run.path / "report.json", json.dumps(report, indent=2) + "\n")
    html_file = run.path / "report.html"
    _replace(html_file, render_html(records, report, extremes_of(annotated(run))))
    return html_file


def _replace(path: Path, text: str) -> None:
    staged = path.with_name(path.name + ".tmp")
    try:
        staged.write_text(text, encoding="utf-8")
        staged.replace(path)
    except OSError:  # a full disk: half a report is of no use
        staged.unlink(missing_ok=True)
        raise


def build_report(records: RunRecords) -> dict[str, Any]:
    """The figures of a run. What a run has not reached yet is null."""
    steps = records.steps
    accuracies = accuracy_by_environment(records)
    cancelled = cancelled_by_reason(records)
    failed = failed_by_environment(records)
    for step in steps:  # tokens that carry a gradient, where the trainer told them apart from prompts
        step["trained_tokens"] = 0 if step.get("step_skipped") else step.get("loss_tokens", step.get("tokens", 0))
    tokens = sum(int(step["trained_tokens"]) for step in steps)
    training_s = _span_s(steps)
    return {
        "run": records.name,
        "state": run_state(records),
        "reason": ending_reason(records),
        "seed": _setting(records, "run", "seed"),
        "accuracy_before": mean_accuracy(accuracies, "before"),
        "accuracy_after": mean_accuracy(accuracies, "after"),
        "accuracy_by_environment": accuracies,
        "wall_s": wall_s(records),
        "steps": len(steps),
        "lag_max": max((int(step.get("lag_max", 0)) for step in steps), default=None),
        "lag_mean": weighted_mean(steps, "lag_mean", "groups_trained"),
        "lag_bound": _setting(records, "orchestrator", "max_off_policy_steps"),
        "overlap_fraction": overlap_fraction(records),
        **{part: weighted_mean(steps, part, "trained_tokens") for part in MISMATCH_PARTS},
        **replay_figures(steps),
        "teacher_kl": weighted_mean(steps, "teacher_kl", "trained_tokens"),
        "ratio_p999": largest(steps, "ratio_p999"),
        "pure_max_abs_diff": largest(steps, "pure_max_abs_diff"),
        "routes_unknown_fraction": weighted_mean(steps, "routes_unknown_fraction", "tokens"),
        "cached_token_fraction": cached_token_fraction(steps),
        "reward_first": steps[0].get("reward_mean") if steps else None,
        "reward_last": steps[-1].get("reward_mean") if steps else None,
        "reward_by_role": next((step["reward_by_role"] for step in reversed(steps) if "reward_by_role" in step), None),
        "groups_trained": sum(int(step.get("groups_trained", 0)) for step in steps),
        "groups_trained_by_environment": trained_by_environment(steps),
        "groups_filtered": groups_filtered(records),
        "success_rate_by_environment": steps[-1].get("success_rate_by_environment") if steps else None,
        "rollouts_given_up": sum(int(step.get("rollouts_given_up", 0)) for step in steps),
        "given_up_token_count": sum(int(step.get("given_up_token_count", 0)) for step in steps),
        "groups_failed": sum(failed.values()),
        "groups_failed_by_environment": failed,
        "tokens_trained": tokens,
        "trained_tokens_per_s": tokens / training_s if training_s else None,
        "versions_applied": len(records.of_kind("update")),
        "update_pause_s_mean": mean(update.get("pause_s") for update in records.of_kind("update")),
        "rollouts_cancelled": sum(cancelled.values()),
        "rollouts_cancelled_by_reason": cancelled,
        "groups_cancelled_by_reason": cancelled_by_reason(records, "groups"),
        "sandbox_executions": sandbox_executions(records),
    }


def trained_by_environment(steps: Iterable[Record]) -> dict[str, int]:
    """Groups that were trained; those of sessions under a name of their own."""
    found: Counter[str] = Counter()
    for step in steps:
        if int(step.get("groups_trained", 0)):  # not of a step that was skipped
            found.update(step.get("groups_by_environment", {}))
    return dict(found)


def groups_filtered(records: RunRecords) -> int:
    """Groups filtered for want of variance, those after the last step too."""
    totals = [int(record["groups_filtered_in_run"]) for record in records.metrics if "groups_filtered_in_run" in record]
    return max(totals, default=0)


def accuracy_by_environment(records: RunRecords) -> dict[str, dict[str, Any]]:
    """For each environment: accuracy before and after, and the problems asked."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for evaluation in records.of_kind("evaluation"):
        of_environment = found[str(evaluation["environment"])]
        of_environment[str(evaluation["name"])] = float(evaluation["accuracy"])
        of_environment["count"] = int(evaluation["count"])
    return dict(found)


def mean_accuracy(accuracies: dict[str, dict[str, Any]], name: str) -> float | None:
    """Part of all problems that were right, of whichever environment; None until every one has been asked."""
    asked = sum(each["count"] for each in accuracies.values())
    if not asked or any(name not in each for each in accuracies.values()):
        return None
    return sum(each[name] * each["count"] for each in accuracies.values()) / asked


def overlap_fraction(records: RunRecords) -> float | None:
    """Time with a training step and at least one decode running / time with a training step."""
    training = union(records.intervals("train_step"))
    if not training:
        return None
    decoding = union(records.intervals("decode"))
    return total_s(intersection(training, decoding)) / total_s(training)


def cancelled_by_reason(records: RunRecords, unit: str = "count") -> dict[str, int]:
    """Cancelled rollouts (`count`) or groups (`groups`) by reason, most first."""
    counts: dict[str, int] = defaultdict(int)
    for cancelled in records.of_kind("cancelled"):
        counts[str(cancelled.get("reason", "unknown"))] += int(cancelled.get(unit, 1))
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def failed_by_environment(records: RunRecords) -> dict[str, int]:
    """Groups that failed, of training and of evaluations, most first; environment code raised, or too few members."""
    counts = Counter(str(failed["environment"]) for failed in records.of_kind("group_failed"))
    return dict(counts.most_common())


def replay_figures(steps: list[Record]) -> dict[str, Any]:
    """Of the tokens that were computed both with and without replay: mean k3, of all and of each kind of them."""
    tokens = sum(int(step.get("replay_check_tokens", 0)) for step in steps)
    shares = {kind: weighted_mean(steps, f"replay_check_{kind}_fraction", REPLAY_WEIGHT) for kind in REPLAY_KINDS}
    shares = {kind: share for kind, share in shares.items() if share}
    return {
        "replay_check_tokens": tokens,
        "mismatch_share": shares if tokens else None,
        "mismatch_replay_on": _mean_k3(steps, "replay_on", shares) if tokens else None,
        "mismatch_replay_off": _mean_k3(steps, "replay_off", shares) if tokens else None,
        "routes_flipped_fraction": weighted_mean(steps, "routes_flipped_fraction", REPLAY_WEIGHT),
    }


def _mean_k3(steps: list[Record], name: str, shares: dict[str, Any]) -> dict[str, float]:
    # A step's part is the sum over its own tokens divided by all, so that the parts add up to the whole.
    parts = {kind: weighted_mean(steps, f"{name}_{kind}", REPLAY_WEIGHT) or 0.0 for kind in shares}
    return {"all": sum(parts.values()), **{kind: part / shares[kind] for kind, part in parts.items()}}


def lag_histogram(records: RunRecords) -> dict[int, int]:
    """Trained groups by lag; steps that only state their mean count at the rounded mean."""
    counts: dict[int, int] = defaultdict(int)
    for step in records.steps:
        if "lag_counts" in step:
            for lag, count in step["lag_counts"].items():
                counts[int(lag)] += int(count)
        elif step.get("lag_mean") is not None:
            counts[round(float(step["lag_mean"]))] += int(step.get("groups_trained", 1))
    return dict(sorted(counts.items()))


def cached_token_fraction(steps: list[Record]) -> float | None:
    """Part of the prompt tokens whose KV was found in a prefix cache."""
    asked = sum(int(step.get("prefix_query_token_count", 0)) for step in steps)
    if asked:
        return sum(int(step.get("cached_token_count", 0)) for step in steps) / asked
    return weighted_mean(steps, "cached_token_fraction", "tokens")


def sandbox_executions(records: RunRecords) -> int:
    """Programs run by the sandbox executors: the newest of the running totals in the metrics."""
    totals = [int(record["sandbox_executions"]) for record in records.metrics if "sandbox_executions" in record]
    return max(totals, default=0)


def wall_s(records: RunRecords) -> float | None:
    """While launchers were at work, from start to end; of one without an end, to the newest record."""
    times = [float(record["time_s"]) for record in records.metrics if "time_s" in record]
    if records.begun_s is None:
        return round(max(times) - min(times), 3) if times else None
    still_s = [] if records.ended_s is not None else times
    return round(worked_s(records.launcher, max(still_s, default=0.0)), 3)


def run_state(records: RunRecords) -> str:
    """How the run ended by its own word, else by the launcher's: a run whose service died cannot say so."""
    states = [str(record.get("state")) for record in records.of_kind("run")]
    if states and states[-1] in ENDED_STATES:
        return states[-1]
    endings = [record for record in records.launcher if record.get("kind") in ("run_started", "run_ended")]
    if not endings or endings[-1]["kind"] == "run_started":
        return "running"
    stopped = endings[-1].get("stopped") or int(endings[-1].get("exit_code", 0)) >= SIGNAL_EXIT_CODE
    return "stopped" if stopped else "failed"


def ending_reason(records: RunRecords) -> str:
    """Why the run ended when it did, whole; empty while it runs, and where it simply finished."""
    endings = [record for record in records.launcher if record.get("kind") in ("run_started", "run_ended")]
    return str(endings[-1].get("reason", "")) if endings else ""


def weighted_mean(steps: Iterable[Record], name: str, weight_name: str) -> float | None:
    """Mean over steps that have the value, weighted; equal weights where all are zero or missing."""
    pairs = [(float(s[name]), float(s.get(weight_name) or 0)) for s in steps if s.get(name) is not None]
    if not pairs:
        return None
    total = sum(weight for _, weight in pairs)
    if not total:
        return sum(value for value, _ in pairs) / len(pairs)
    return sum(value * weight for value, weight in pairs) / total


def largest(steps: Iterable[Record], name: str) -> float | None:
    return max((float(step[name]) for step in steps if step.get(name) is not None), default=None)


def mean(values: Iterable[Any]) -> float | None:
    present = [float(value) for value in values if value is not None]
    return sum(present) / len(present) if present else None


def _span_s(steps: list[Record]) -> float:
    times = [float(step["time_s"]) for step in steps if "time_s" in step]
    return max(times) - min(times) + float(steps[0].get("step_s") or 0) if len(times) > 1 else 0.0


def _setting(records: RunRecords, section: str, key: str) -> Any:
    return records.config.get(section, {}).get(key)
