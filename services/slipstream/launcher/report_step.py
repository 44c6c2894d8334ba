"""One training step for the report: the groups that it trained, from their dispatch on, and who worked meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.launcher.charts import BLUE, GREY, ORANGE, PURPLE, RED, TEAL, Track
from slipstream.launcher.intervals import Interval
from slipstream.launcher.records import Record, RunRecords

COLORS = {"queue": GREY, "place": RED, "prefill": TEAL, "decode": ORANGE, "tools": PURPLE, "score": PURPLE,
          "training": BLUE}  # fmt: skip
"""Stretches of a group's life, later ones drawn over earlier ones."""
STRETCHES = [("waiting for a step", GREY), ("placing", RED), ("prefill", TEAL), ("decode", ORANGE),
             ("tools and scores", PURPLE), ("training", BLUE)]  # fmt: skip
MAX_GROUPS = 12


@dataclass(frozen=True)
class StepPicture:
    """What is drawn: the groups' rows; those of the processes are the caller's."""

    number: int
    tracks: Sequence[Track]
    begin_s: float
    end_s: float
    sentence: str


def picture_of_a_step(records: RunRecords) -> StepPicture | None:
    """Of a step in the middle of the run, one whose groups were traced if there is any; None without steps."""
    trained = [r for work in records.timeline.values() for r in work if r.get("kind") == "train_step" and "step" in r]
    trained.sort(key=lambda record: float(record["start_s"]))
    if not trained:
        return None
    traced = [record for record in trained if record.get("links")]
    chosen = (traced or trained)[len(traced or trained) // 2]
    number = int(chosen["step"])
    earlier = [float(r["end_s"]) for r in trained if int(r["step"]) < number]
    published = [float(r["end_s"]) for work in records.timeline.values() for r in work
                 if r.get("kind") == "publish" and r.get("step") == number]  # fmt: skip
    rows = _rows(records, [str(trace_id) for trace_id, _ in chosen.get("links", [])])
    shapes = [interval for track in rows for interval, _ in track.intervals]
    begin_s = min([float(chosen["start_s"]), *(start for start, _ in shapes), *earlier[-1:]])
    end_s = max([float(chosen["end_s"]), *published])
    sentence = (
        "A row for each group that it trained and that was traced, from its dispatch to the end of the step."
        if rows
        else "With tracing.sample_share above 0 the groups that it trained have rows of their own here."
    )
    return StepPicture(number, rows, begin_s, end_s, sentence)


def _rows(records: RunRecords, trace_ids: Sequence[str]) -> list[Track]:
    """The first groups, in the order in which they were dispatched."""
    of_trace: dict[str, list[Record]] = {trace_id: [] for trace_id in trace_ids}
    for spans in records.spans.values():
        for span in spans:
            if span["trace"] in of_trace:
                of_trace[str(span["trace"])].append(span)
    groups = sorted((spans for spans in of_trace.values() if spans), key=lambda s: min(float(r["start_s"]) for r in s))
    return [Track(_name(spans), _stretches(spans)) for spans in groups[:MAX_GROUPS]]


def _name(spans: Sequence[Record]) -> str:
    return next((str(span["group_id"]) for span in spans if "group_id" in span), "a group")


def _stretches(spans: Sequence[Record]) -> list[tuple[Interval, str]]:
    return [
        ((float(span["start_s"]), float(span["end_s"])), color)
        for name, color in COLORS.items()
        for span in spans
        if span.get("name") == name
    ]
