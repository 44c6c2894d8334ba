"""`slipstream rollouts [RUN]`: which rollouts there were, filtered and sorted, or one of them whole.

Reads the run's files alone, so it works while the run goes on and after it.
"""

from __future__ import annotations

import heapq
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slipstream.common.config import ConfigError
from slipstream.launcher.errors import RunDirError
from slipstream.launcher.options import take
from slipstream.launcher.outcomes import OUTCOMES, Outcomes, read_outcomes
from slipstream.launcher.rollout_files import Damage, read_rollouts, rollout_id, spans_of
from slipstream.launcher.rundir import RunDir, find_services_run

USAGE = """\
usage: slipstream rollouts [RUN] [OPTION]...

List the rollouts that a run has recorded, the newest first, while it goes on or after it.
RUN is a name in runs/ or a path; without it, the newest run is meant.

  --environment NAME     of one environment
  --purpose PURPOSE      training, evaluation or external
  --group GROUP          of one group
  --version VERSION      with tokens that this version sampled, such as 1.12
  --step N or A:B        that these steps were trained on; A: and :B leave an end open
  --reward R or A:B      with such a reward, ends included
  --outcome OUTCOME      trained, skipped, sealed, waiting, filtered, failed, aged_out, dropped, cancelled or lost;
                         right or wrong
  --text WORDS           with these words in prompt, answer or verdict, in capitals or not
  --sort KEY             by time, reward, tokens, turns, seconds, lag or step, the largest first; -KEY the smallest
  --limit N              that many at most; 0 means all. 20 unless told
  --per-group N          that many of each group at most, the first in the order; 0 means all. Unless told 1 with
                         --sort, whose top would be a few groups of like answers; all without it, and with --group
                         or --limit 0
  --show ROLLOUT         one rollout whole, its tokens coloured by version; that of a session by its id, too
  --json                 whole records, a line each, for programs
"""
LIMIT = 20
SORT_KEYS = ("time", "reward", "tokens", "turns", "seconds", "lag", "step")
PURPOSES = ("training", "evaluation", "external")
RIGHT, WRONG = "right", "wrong"

Record = dict[str, Any]
Wanted = Callable[[Record], bool]
Ranked = tuple[float, int, Record]
"""A rank, a number that no other has, and the record."""


@dataclass
class Query:
    """What was asked for."""

    run: str | None
    wanted: list[Wanted]
    sort: str | None
    smallest: bool
    limit: int
    per_group: int | None
    """As told; None where nothing was."""
    show: str | None
    json: bool
    of_group: bool = False
    """Whether it is the rollouts of one group that are asked for."""

    @property
    def most_of_group(self) -> int:
        """Rollouts of a group that are shown; 0 means all."""
        if self.per_group is not None:
            return self.per_group
        return 0 if self.sort is None or self.of_group or not self.limit else 1


def rollouts(arguments: Sequence[str]) -> int:
    """Run the command. Raises `ConfigError` or `RunDirError` for what it cannot make sense of."""
    query = parse(arguments)
    run = find_services_run(query.run)
    damage = Damage()
    try:
        return _tell(run, query, damage)
    finally:
        for sentence in damage.sentences():
            print(f"note: {sentence}", file=sys.stderr)


def _tell(run: RunDir, query: Query, damage: Damage) -> int:
    if query.show is not None:
        return _show(run, query.show, damage, as_json=query.json)
    if query.per_group is None and query.most_of_group:
        print("one of each group; --per-group 0 shows all", file=sys.stderr)
    if query.json:
        for record in select(run, query, damage):
            print(json.dumps(record, ensure_ascii=True))
        return 0
    from slipstream.launcher.rollout_view import open_console, table_of

    found = select(run, query, damage)
    if not found:
        print(f"{run.name}: no rollout of this kind" if query.wanted else f"{run.name}: no rollouts yet")
        return 0
    console = open_console()
    console.print(table_of(found, console.width), soft_wrap=True)
    return 0


def select(run: RunDir, query: Query, damage: Damage) -> list[Record]:
    """The rollouts asked for, in order; of equal ones those recorded first."""
    limit, most = query.limit or math.inf, query.most_of_group or math.inf
    rank = _rank(query)
    groups: dict[str, list[Ranked]] = {}
    kept = 0
    wanted = (record for record in annotated(run, damage) if all(takes(record) for takes in query.wanted))
    for number, record in enumerate(wanted):
        group = groups.setdefault(str(record.get("group_id")), [])
        heapq.heappush(group, (rank(record), -number, record))
        if len(group) > most:
            heapq.heappop(group)
        else:
            kept += 1
        if kept > 2 * limit:  # there may be more than memory holds
            groups, kept = _grouped(_first(groups, query.limit)), query.limit
    return [record for _, _, record in _first(groups, query.limit)]


def _first(groups: Mapping[str, list[Ranked]], limit: int) -> list[Ranked]:
    ranked = sorted((each for group in groups.values() for each in group), reverse=True)
    return ranked[:limit] if limit else ranked


def _grouped(ranked: Sequence[Ranked]) -> dict[str, list[Ranked]]:
    groups: dict[str, list[Ranked]] = {}
    for each in reversed(ranked):  # the least first: a heap as it stands
        groups.setdefault(str(each[2].get("group_id")), []).append(each)
    return groups


def annotated(run: RunDir, damage: Damage | None = None) -> Iterator[Record]:
    """All rollouts of a run, each with its name, how many tokens it sampled, and what became of it.

    What cannot be read is counted in `damage`.
    """
    outcomes = read_outcomes(run.path / "journal")
    for record in read_rollouts(run.path / "rollouts", damage=damage):
        yield annotate(record, outcomes)


def annotate(record: Record, outcomes: Outcomes) -> Record:
    """`rollout`, `tokens`, `seconds`, `outcome`, `step` and `lag` beside what was recorded."""
    record["rollout"] = rollout_id(record)
    record["tokens"] = sum(count for count, _ in spans_of(record))
    record["seconds"] = float(record.get("timings", {}).get("total_s", 0.0))
    record["step"] = record["lag"] = None
    if record.get("purpose") == "training":
        outcome = outcomes.of(str(record.get("group_id")), int(record.get("attempt", 1)))
        record["outcome"], record["step"], record["lag"] = outcome.name, outcome.step, outcome.lag
    else:
        record["outcome"] = RIGHT if record.get("correct") else WRONG
    return record


def _rank(query: Query) -> Callable[[Record], float]:
    """What is largest comes first."""
    name = "time_s" if query.sort in (None, "time") else query.sort
    sign = -1 if query.smallest else 1

    def rank(record: Record) -> float:
        value = record.get(name)
        return -math.inf if value is None else sign * float(value)

    return rank


def _show(run: RunDir, name: str, damage: Damage, *, as_json: bool) -> int:
    near: list[str] = []
    for record in annotated(run, damage):
        if name in (record["rollout"], record.get("session_id")):
            break
        if str(record.get("group_id")) == name and len(near) < 4:
            near.append(record["rollout"])
    else:
        meant = f"; it has {', '.join(near)}" if near else "; slipstream rollouts lists them"
        raise RunDirError(f"{run.name} has no rollout called {name}{meant}")
    if as_json:
        print(json.dumps(record, ensure_ascii=True))
        return 0
    from slipstream.launcher.rollout_view import decoder, open_console, view_of

    console = open_console()
    coloured = console.is_terminal and not console.no_color
    console.print(view_of(record, decoder(run.path / "model"), colours=coloured), end="", soft_wrap=True)
    return 0


def parse(arguments: Sequence[str]) -> Query:
    """What the command line asks for. Raises `ConfigError`."""
    query = Query(None, [], None, smallest=False, limit=LIMIT, per_group=None, show=None, json=False)

    def as_json() -> None:
        query.json = True

    def name_run(word: str) -> bool:
        free = query.run is None
        query.run = word if free else query.run
        return free

    options = {name: partial(option, query) for name, option in OPTIONS.items()}
    take(arguments, "slipstream rollouts", options, {"--json": as_json}, name_run)
    return query


def _equal(field: str, known: Sequence[str] = ()) -> Callable[[Query, str], None]:
    def take(query: Query, value: str) -> None:
        if known and value not in known:
            raise ConfigError(f"{value!r} is none of {', '.join(known)}")
        query.wanted.append(lambda record: str(record.get(field)) == value)

    return take


def _within(field: str) -> Callable[[Query, str], None]:
    def take(query: Query, value: str) -> None:
        first, colon, last = value.partition(":")
        try:
            low = float(first) if first else -math.inf
            high = (float(last) if last else math.inf) if colon else low
        except ValueError:
            low = high = math.nan
        if not low <= high:
            raise ConfigError(f"{value!r} is no number and no range such as 0.5:1")
        query.wanted.append(lambda record: record.get(field) is not None and low <= float(record[field]) <= high)

    return take


def _group(query: Query, value: str) -> None:
    query.of_group = True
    _equal("group_id")(query, value)


def _version(query: Query, value: str) -> None:
    if not re.fullmatch(r"\d+\.\d+", value):
        raise ConfigError(f"--version takes a version such as 1.12, incarnation and step, not {value!r}")
    query.wanted.append(lambda record: any(version == value for _, version in spans_of(record)))


def _outcome(query: Query, value: str) -> None:
    if value in (RIGHT, WRONG):
        query.wanted.append(lambda record: bool(record.get("correct")) is (value == RIGHT))
    else:
        _equal("outcome", OUTCOMES)(query, value)


def _text(query: Query, value: str) -> None:
    words = value.casefold()
    texts = ("prompt", "completion", "detail")
    query.wanted.append(lambda record: any(words in str(record.get(name, "")).casefold() for name in texts))


def _sort(query: Query, value: str) -> None:
    query.sort, query.smallest = value.removeprefix("-"), value.startswith("-")
    if query.sort not in SORT_KEYS:
        raise ConfigError(f"{value!r} is none of {', '.join(SORT_KEYS)}")


def _count(option: str) -> Callable[[Query, str], None]:
    def take(query: Query, value: str) -> None:
        if not value.isdecimal():
            raise ConfigError(f"--{option} takes a number, not {value!r}")
        setattr(query, option.replace("-", "_"), int(value))

    return take


def _show_one(query: Query, value: str) -> None:
    query.show = value


OPTIONS: dict[str, Callable[[Query, str], None]] = {
    "--environment": _equal("environment"),
    "--purpose": _equal("purpose", PURPOSES),
    "--group": _group,
    "--version": _version,
    "--step": _within("step"),
    "--reward": _within("reward"),
    "--outcome": _outcome,
    "--text": _text,
    "--sort": _sort,
    "--limit": _count("limit"),
    "--per-group": _count("per-group"),
    "--show": _show_one,
}
