"""From a record of `metrics.jsonl` to what a tracker shows: numbers by name, and the step they belong to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_OF_EVALUATIONS = (
    *("reward_mean", "pass_at_k", "tokens_mean", "truncated_fraction"),
    *("reward_by_role", "accuracy_by_role"),
)
_LEFT_OUT = ("step", "time_s", "kind")


@dataclass(frozen=True, slots=True)
class Point:
    """Figures of one step, or of an evaluation at one."""

    step: int
    time_s: float
    figures: dict[str, float]


def point_of(record: Mapping[str, object]) -> Point | None:
    """What a tracker shows of a record; None where that is nothing.

    Steps keep their names, `train/loss` for one; tables become `train/reward_by_environment/<name>`. Evaluations are
    `evaluation/<environment>`, the accuracy, one curve over all of them, and the same with `/reward_mean`,
    `/pass_at_k/<k>`, `/tokens_mean` and `/truncated_fraction`.
    """
    kind, step, time_s = record.get("kind"), record.get("step"), record.get("time_s")
    if not isinstance(step, int) or not isinstance(time_s, float | int):
        return None
    if kind == "step":
        numbers = ((name, value) for name, value in record.items() if name not in _LEFT_OUT)
        figures = {f"train/{name}": value for name, value in _flat(numbers)}
    elif kind == "evaluation":
        name = str(record["environment"])
        more = [(f"{name}/{each}", record[each]) for each in _OF_EVALUATIONS if each in record]
        figures = {f"evaluation/{name}": value for name, value in _flat([(name, record["accuracy"]), *more])}
    else:
        return None
    return Point(step, float(time_s), figures) if figures else None


def _flat(items: Iterator[tuple[str, object]] | list[tuple[str, object]]) -> Iterator[tuple[str, float]]:
    for name, value in items:
        if isinstance(value, Mapping):
            yield from _flat([(f"{name}/{key}", inner) for key, inner in value.items()])
        elif isinstance(value, float | int) and math.isfinite(value):
            yield name, float(value)
