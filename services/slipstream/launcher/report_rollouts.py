"""The best, the worst and the most delayed rollouts of training, as tables of HTML."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from html import escape
from typing import Any

SHOWN = 4
EXCERPT_CHARS = 600
BULKY = ("token_ids", "logprobs_base64")

Record = dict[str, Any]
Rank = tuple[float, ...]


@dataclass
class Extremes:
    """The rollouts at the ends of each order, the outermost first."""

    best: list[Record] = field(default_factory=list[Record])
    worst: list[Record] = field(default_factory=list[Record])
    delayed: list[Record] = field(default_factory=list[Record])


def extremes_of(rollouts: Iterable[Record]) -> Extremes:
    """One pass over annotated rollouts, which may be many. Of equal ones the latest count more."""
    best, worst, delayed = _TopOfGroups(_reward), _TopOfGroups(_lowness), _TopOfGroups(_delay)
    for record in rollouts:
        if record.get("purpose") == "training":
            for top in (best, worst, delayed):
                top.offer(record)
    found = Extremes(best.records(), worst.records(), delayed.records())
    if found.best and float(found.best[0].get("reward", 0)) == float(found.worst[0].get("reward", 0)):
        found.worst = []  # all earned the same
    return found


def _reward(record: Record) -> Rank:
    return float(record.get("reward", 0)), float(record.get("time_s", 0))


def _lowness(record: Record) -> Rank:
    return -float(record.get("reward", 0)), float(record.get("time_s", 0))


def _delay(record: Record) -> Rank:
    return float(record.get("lag") or 0), float(record.get("seconds") or 0)


class _Top:
    """The `SHOWN` largest by a rank."""

    def __init__(self, rank: Callable[[Record], Rank]) -> None:
        self._rank = rank
        self._heap: list[tuple[Rank, int, Record]] = []
        self._numbers = itertools.count()

    def offer(self, record: Record) -> None:
        rank = self._rank(record)
        if len(self._heap) == SHOWN and rank <= self._heap[0][0]:
            return
        entry = (rank, next(self._numbers), _slim(record))
        if len(self._heap) < SHOWN:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heapreplace(self._heap, entry)

    def records(self) -> list[Record]:
        return [record for _, _, record in sorted(self._heap, key=lambda entry: (entry[0], entry[1]), reverse=True)]


class _TopOfGroups:
    """The same of different groups, filled up with others where there are not so many."""

    def __init__(self, rank: Callable[[Record], Rank]) -> None:
        self._rank = rank
        self._all = _Top(rank)
        self._by_group: dict[str, Record] = {}

    def offer(self, record: Record) -> None:
        self._all.offer(record)
        group = str(record.get("group_id"))
        lowest = group
        if group not in self._by_group:
            if len(self._by_group) < SHOWN:
                self._by_group[group] = _slim(record)
                return
            lowest = min(self._by_group, key=lambda name: self._rank(self._by_group[name]))
        if self._rank(record) > self._rank(self._by_group[lowest]):
            del self._by_group[lowest]
            self._by_group[group] = _slim(record)

    def records(self) -> list[Record]:
        found = list(self._by_group.values())
        names = {record.get("rollout") for record in found}
        found += [record for record in self._all.records() if record.get("rollout") not in names]
        return sorted(found[:SHOWN], key=self._rank, reverse=True)


def _slim(record: Record) -> Record:
    return {name: value for name, value in record.items() if name not in BULKY}


def extreme_tables(extremes: Extremes) -> list[tuple[str, str, str]]:
    """For each end: its title, its table, and a note. None where nothing was recorded."""
    shown = (
        (
            "The best rewards",
            extremes.best,
            "Of different groups, and of equal ones the latest. Filtered ones are among them.",
        ),
        ("The worst rewards", extremes.worst, "Of different groups, and of equal ones the latest."),
        (
            "The most delayed",
            extremes.delayed,
            "Of different groups, by the versions behind when they were trained, then by the seconds of their group "
            "from its start to its scores. Whole: slipstream rollouts --show NAME.",
        ),
    )
    return [(title, _table(records), note) for title, records, note in shown if records]


def _table(records: list[Record]) -> str:
    head = "<thead><tr><th>rollout</th><th>problem</th><th>answer</th></tr></thead>"
    rows = "".join(
        f"<tr><td>{_facts(record)}</td><td>{_code(record.get('prompt'))}</td><td>{_code(record.get('completion'))}</td></tr>"
        for record in records
    )
    return f"<table>{head}<tbody>{rows}</tbody></table>"


def _facts(record: Record) -> str:
    lines = [f"reward {float(record.get('reward', 0)):.3g}", str(record.get("outcome", ""))]
    lines[:1] += [f"as {each.get('role')} {float(each.get('reward', 0)):.3g}" for each in record.get("roles", ())]
    if record.get("step") is not None:
        lines[-1] += f" at step {record['step']}, lag {record.get('lag')}"
    lines.append(f"{float(record.get('seconds') or 0):.1f} s, {record.get('tokens')} tokens")
    name = f"<code>{escape(str(record.get('rollout')))}</code>"
    return "<br>".join([name, escape(str(record.get("environment"))), *map(escape, lines)])


def _code(text: object) -> str:
    words = str(text if text is not None else "")
    cut = words if len(words) <= EXCERPT_CHARS else words[:EXCERPT_CHARS] + " …"
    return f"<code>{escape(cut) or '&nbsp;'}</code>"
