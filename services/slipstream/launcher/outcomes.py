"""What became of each attempt at a training group, out of the journal: trained at which step, how late, or why not.

Only the few fields that this takes are parsed: a sealed step's record is mostly its packed plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.launcher.errors import RunDirError

WAITING = "waiting"
"""Scored, and in no step yet; or the run ended before."""
KINDS = (b'"sealed"', b'"trained"', b'"skipped"', b'"ended"', b'"regenerated"', b'"lost"')
OUTCOMES = ("trained", "skipped", "sealed", WAITING, "filtered", "failed", "aged_out", "dropped", "cancelled", "lost")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one attempt."""

    name: str
    step: int | None = None
    """The step it was sealed for."""
    lag: int | None = None
    """Versions it was behind then."""


class Outcomes:
    """By group and attempt. What the journal no longer has is `waiting`."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], Outcome] = {}
        self._steps: dict[int, list[tuple[str, int]]] = {}

    def of(self, group_id: str, attempt: int) -> Outcome:
        return self._found.get((group_id, attempt), Outcome(WAITING))

    def take(self, record: dict[str, Any]) -> None:
        """Follow one record of the journal."""
        kind = record.get("kind")
        if kind == "sealed":
            self._seal(record)
        elif kind in ("trained", "skipped"):
            for key in self._steps.get(int(record["step"]), []):
                self._found[key] = Outcome(kind, self._found[key].step, self._found[key].lag)
        elif kind in ("ended", "regenerated", "lost") and "position" in record:
            name = "lost" if kind == "lost" else str(record.get("outcome", "failed"))
            self._found[_key(record["position"], record.get("attempt", 1))] = Outcome(name)

    def _seal(self, record: dict[str, Any]) -> None:
        step = int(record["step"])
        keys = self._steps[step] = []
        for position, attempt, dispatched in zip(
            record["positions"], record["attempts"], record["dispatch_steps"], strict=True
        ):
            key = _key(position, attempt)
            keys.append(key)
            self._found[key] = Outcome("sealed", step, step - 1 - int(dispatched))


def _key(position: Any, attempt: Any) -> tuple[str, int]:
    return f"train-{position}", int(attempt)


def read_outcomes(directory: Path) -> Outcomes:
    """Those in a run's `journal/`, which may be written meanwhile. Raises `RunDirError` for what is no file."""
    outcomes = Outcomes()
    for path in [*sorted(directory.glob("journal-*.jsonl")), directory / "journal.jsonl"]:
        for record in _records(path):
            try:
                outcomes.take(record)
            except (KeyError, TypeError, ValueError):
                continue  # a damaged record costs itself alone: `slipstream rl --resume` is where it matters
    return outcomes


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as lines:
            for line in lines:
                head = line[9:120]
                if not any(kind in head for kind in KINDS):
                    continue
                body, plans, _ = line[9:].partition(b',"plans":')
                try:
                    record = json.loads(body + b"}" if plans else body)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict):
                    yield record
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunDirError(f"{path} cannot be read: {error.strerror}") from None
