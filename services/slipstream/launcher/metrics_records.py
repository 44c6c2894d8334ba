"""Records of `metrics.jsonl`, each of the shape its kind has; a damaged one is told in a sentence."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from slipstream.common.disk import with_older
from slipstream.launcher.errors import RunDirError

Record = dict[str, Any]

REQUIRED = {
    "step": ("step",),
    "evaluation": ("name", "environment", "step", "accuracy", "count"),
    "group_failed": ("environment",),
    "update": (),
    "cancelled": (),
    "run": (),
    "totals": (),
}
"""Kinds that are read back, and what none of them lacks."""

TEXTS = frozenset(
    {
        *("kind", "name", "environment", "version", "replica", "state", "reason", "cause", "stage"),
        *("version_min", "version_max"),
        *("group_id", "detail", "runner"),
    }
)
"""Fields that are text; all others are numbers, or numbers by name."""


def read_lines(path: Path) -> Iterator[tuple[int, Record]]:
    """Numbered records of a file; none if it is missing. A half-written last line of a killed writer is left out.

    Raises `RunDirError` for what is no file.
    """
    if not path.exists():
        return
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    record = json.loads(line)
                except (json.JSONDecodeError, RecursionError):
                    continue
                if isinstance(record, dict):
                    yield number, record
    except OSError as error:
        raise RunDirError(f"{path} cannot be read: {error.strerror}") from None


def worked_s(events: Iterable[Record], newest_s: float = 0.0) -> float:
    """Seconds that launchers of a run were at work, by what they wrote. Each until its last event, the last one until
    `newest_s` if that is later.
    """
    total_s, begun_s, last_s = 0.0, None, 0.0
    for event in events:
        if event.get("kind") == "run_started":
            total_s += last_s - begun_s if begun_s is not None else 0.0
            begun_s = float(event.get("time_s", last_s))
        last_s = float(event.get("time_s", last_s))
    return total_s + (max(last_s, newest_s) - begun_s if begun_s is not None else 0.0)


def read_json_lines(path: Path) -> Iterator[Record]:
    """Records of a file; none if it is missing. Raises `RunDirError` for what is no file."""
    return (record for _, record in read_lines(path))


def was_prepared(events: Iterable[Record]) -> bool:
    """Whether a run's processes are started elsewhere, by what launchers wrote: none here knows of them."""
    kinds = {event.get("kind") for event in events}
    return "run_prepared" in kinds and "run_started" not in kinds


def read_metrics(path: Path) -> list[Record]:
    """All records of a `metrics.jsonl` and of the older file that it became, oldest first.

    Raises `RunDirError` for the first that no service can have written.
    """
    records: list[Record] = []
    for file in with_older(path):
        for number, record in read_lines(file):
            fault = fault_of(record)
            if fault:
                raise RunDirError(f"{file}, line {number}, is damaged: {fault}; remove the line")
            records.append(record)
    return records


def fault_of(record: Record) -> str:
    """What is wrong with a record, or nothing."""
    kind = record.get("kind")
    required = REQUIRED.get(kind) if isinstance(kind, str) else None
    if required is None:
        return "" if isinstance(kind, str) else "it has no kind"
    missing = [name for name in required if record.get(name) is None]
    if missing:
        return f"a record of kind {kind} without {missing[0]}"
    for name, value in record.items():
        if name in TEXTS:
            fits = isinstance(value, str)
        else:
            fits = is_number(value) if name in required else _is_figure(name, value)
        if not fits:
            return f"{name} is {json.dumps(value)[:40]} in a record of kind {kind}"
    return ""


def _is_figure(name: str, value: Any) -> bool:
    if isinstance(value, dict):
        numbered = name.endswith("lag_counts") or name == "pass_at_k"
        return all(is_number(each) and (not numbered or key.isdecimal()) for key, each in value.items())
    return not _is_table(name) and (value is None or is_number(value))


def _is_table(name: str) -> bool:
    """Whether figures of this name are numbers by name, always."""
    return name.endswith("_counts") or "_by_" in name or name == "pass_at_k"


def is_number(value: Any) -> bool:
    """Whether it is finite, and no integer beyond all floats."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max
