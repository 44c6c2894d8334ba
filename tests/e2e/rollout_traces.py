"""What the traces of a run say of each of its rollouts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from run_process import RunProcess

from slipstream.launcher.records import read_timeline

TRACED = ("--tracing.sample-share", "1")
LIFE = {
    *(("orchestrator", name) for name in ("rollout", "queue", "training")),
    *(("runner", name) for name in ("turn", "place", "decode")),
}
"""Spans of every rollout that was trained, by who wrote them."""
Spans = dict[str, dict[str, Any]]


def spans_by_trace(run: RunProcess) -> dict[str, Spans]:
    """All spans by their ids, by the ids of their traces, each with the service that it is of."""
    traces: dict[str, Spans] = {}
    for replica, records in read_timeline(run.path / "timeline")[1].items():
        for span in records:
            traces.setdefault(span["trace"], {})[span["span"]] = {**span, "service": replica.partition("-")[0]}
    return traces


def names_of(spans: Spans) -> set[tuple[str, str]]:
    """Services and names of spans."""
    return {(span["service"], span["name"]) for span in spans.values()}


def trained(run: RunProcess) -> dict[str, int]:
    """Step that each trained attempt of a group went into."""
    return {
        f"train-{position}.{attempt}": record["step"]
        for record in run.journal()
        if record["kind"] == "sealed"
        for position, attempt in zip(record["positions"], record["attempts"], strict=True)
    }


def check_lives(run: RunProcess) -> dict[str, Spans]:
    """Look at the trace of each rollout that was trained; returns its spans, by the rollout's name.

    There is exactly one, which its record names, and none of another rollout: from its dispatch over the queue to the
    step that trained it, which is linked to it.
    """
    traces, steps = spans_by_trace(run), trained(run)
    linked = {
        (span["step"], tuple(link)): span["span"]
        for spans in traces.values()
        for span in spans.values()
        if span["name"] == "train_step"
        for link in span["links"]
    }
    found: dict[str, Spans] = {}
    for record in run.rollouts():
        group = f"{record['group_id']}.{record['attempt']}"
        name = f"{group}.{record['sample']}"
        if record["purpose"] != "training" or group not in steps:
            continue
        saying = {trace for trace, spans in traces.items() if any(s.get("rollout") == name for s in spans.values())}
        assert saying == {record["trace_id"]}, name
        spans = found[name] = traces[record["trace_id"]]
        assert {span["rollout"] for span in spans.values() if "rollout" in span} == {name}
        assert names_of(spans) >= LIFE, name
        by_name = {span["name"]: span for span in spans.values() if span["service"] == "orchestrator"}
        root, queue, training = (by_name[each] for each in ("rollout", "queue", "training"))
        assert ("parent" in root, root["outcome"]) == (False, "finished"), name
        assert (queue["step"], training["step"]) == (steps[group], steps[group]), name
        step = linked[steps[group], (root["trace"], root["span"])]
        assert [span_id for _, span_id in training["links"]] == [step], name
        ((group_trace, group_span),) = root["links"]
        of_group = traces[group_trace][group_span]
        assert of_group["name"] == "group", name
        assert [root["trace"], root["span"]] in of_group["links"], name
        moments = [root["start_s"], root["end_s"], queue["start_s"], training["start_s"], training["end_s"]]
        # Lengths are of a clock of their own: a hundredth of a second is none.
        assert all(earlier <= later + 0.01 for earlier, later in pairwise(moments)), name
    ids = {next(iter(spans.values()))["trace"] for spans in found.values()}
    assert len(ids) == len(found) > 0
    return found


def check_tree(spans: Spans, name: str) -> None:
    """Every span lies below the rollout's."""
    roots = [span["name"] for span in spans.values() if "parent" not in span]
    assert roots == ["rollout"], name
    assert all(span["parent"] in spans for span in spans.values() if "parent" in span), name
