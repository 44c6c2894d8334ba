"""One training step for the report: rollouts that it trained, from their dispatch on, and who worked meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from slipstream.launcher.charts import BLUE, GREY, ORANGE, PURPLE, RED, TEAL, Track
from slipstream.launcher.intervals import Interval
from slipstream.launcher.records import Record, RunRecords

COLORS = {"queue": GREY, "place": RED, "prefill": TEAL, "decode": ORANGE, "tools": PURPLE, "score": PURPLE,
          "training": BLUE}  # fmt: skip
"""Stretches of a rollout's life, later ones drawn over earlier ones."""
STRETCHES = [("waiting for a step", GREY), ("placing", RED), ("prefill", TEAL), ("decode", ORANGE),
             ("tools and scores", PURPLE), ("training", BLUE)]  # fmt: skip
MAX_ROLLOUTS = 16


@dataclass(frozen=True)
class StepPicture:
    """What is drawn: the rollouts' rows; those of the processes are the caller's."""

    number: int
    tracks: Sequence[Track]
    begin_s: float
    end_s: float
    sentence: str


def picture_of_a_step(records: RunRecords) -> StepPicture | None:
    """Of a step in the middle of the run, one whose rollouts were traced if there is any; None without steps."""
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
        f"A row for each rollout that it trained and that was traced, from its dispatch to the end of the step; at "
        f"most {MAX_ROLLOUTS}, of all its groups. slipstream trace --rollout shows all of one."
        if rows
        else "With tracing.sample_share above 0 the rollouts that it trained have rows of their own here."
    )
    return StepPicture(number, rows, begin_s, end_s, sentence)


def _rows(records: RunRecords, trace_ids: Sequence[str]) -> list[Track]:
    """The first rollouts of each group, then the second ones, in the order in which the groups were dispatched."""
    of_trace: dict[str, list[Record]] = {trace_id: [] for trace_id in trace_ids}
    for spans in records.spans.values():
        for span in spans:
            if span["trace"] in of_trace:
                of_trace[str(span["trace"])].append(span)
    named = [(_begun_s(spans), _name(spans), spans) for spans in of_trace.values() if spans]
    named.sort(key=lambda each: each[:2])
    groups: dict[str, list[str]] = {}
    for _, name, _ in named:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    turns = zip_longest(*groups.values())
    shown = [name for turn in turns for name in turn if name is not None][:MAX_ROLLOUTS]
    return [Track(name, _stretches(spans)) for _, name, spans in named if name in shown]


def _begun_s(spans: Sequence[Record]) -> float:
    return min(float(span["start_s"]) for span in spans)


def _name(spans: Sequence[Record]) -> str:
    return next((str(span["rollout"]) for span in spans if "rollout" in span), "a rollout")


def _stretches(spans: Sequence[Record]) -> list[tuple[Interval, str]]:
    return [
        ((float(span["start_s"]), float(span["end_s"])), color)
        for name, color in COLORS.items()
        for span in spans
        if span.get("name") == name
    ]
