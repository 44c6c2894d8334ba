"""`slipstream trace [RUN]`: one file of all that the services of a run wrote into `timeline/`.

Chrome's JSON trace events, which Perfetto opens as well. The traces of rollouts are in a process of their own there,
with a row for each: all that any service did for it, from its dispatch to its step. Each service is a process, too,
with a row for each kind of its intervals of work, and as many for other spans as run at the same time, what is inside
another below it. Arrows lead from a call to whoever answered it, and from a span to one that is linked to it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.common.config import ConfigError
from slipstream.common.disk import full_disk_named
from slipstream.common.tracing import SPAN
from slipstream.launcher.metrics_records import is_number
from slipstream.launcher.records import Record, is_span, read_replica
from slipstream.launcher.rundir import RunDir, find_services_run, shown

USAGE = """\
usage: slipstream trace [RUN] [--rollout ROLLOUT] [--group GROUP]

Write runs/RUN/trace.json, which https://ui.perfetto.dev and chrome://tracing open: what each service did when, and the
traces of single rollouts if the run was told to take some (tracing.sample_share); such a run writes it at its end by
itself. Works while the run goes on, after it, and after its processes were killed. RUN is a name in runs/ or a path;
without it, the newest run is meant.

  --rollout ROLLOUT   one rollout alone, such as train-12.1.3: its trace, what it shared with its group, and its step.
                      Its trace's id does as well
  --group GROUP       those of one group, such as train-12
"""
FIRST_ROW = 1001
"""Rows are numbered through: Perfetto finds the name of a row by its number alone, whatever its process. Processes have
smaller ones; a row with the number of one would be its main thread."""
HIDDEN = frozenset({"kind", "name", "start_s", "end_s", "parent", "links"})
OPTIONS = {"--rollout": "rollout", "--group": "group_id"}
ROLLOUTS = "rollouts"
"""The process of their traces."""
Event = dict[str, Any]
Lines = Mapping[str, Sequence[Record]]
"""Of each replica's timeline."""


def trace(arguments: Sequence[str]) -> int:
    """Run the command. Raises `ConfigError` or `RunDirError` for what it cannot make sense of."""
    reference, wanted = _parse(arguments)
    run = find_services_run(reference)
    path = run.path / "trace.json"
    lines = read_lines(run)
    if wanted is not None:
        lines = select(lines, *wanted)
        if not any(lines.values()):
            raise ConfigError(f"{run.name}: no trace of {wanted[1]!r}; tracing.sample_share says how many are taken")
    count = write_events(path, events_of(lines))
    print(f"{shown(path)}: {count} events, {len(traces_of(lines))} traces")
    return 0


def read_lines(run: RunDir) -> dict[str, list[Record]]:
    """All that the services of a run wrote."""
    return {file.stem: read_replica(file) for file in sorted((run.path / "timeline").glob("*.jsonl"))}


def traces_of(lines: Lines) -> set[str]:
    """Ids of all traces."""
    return {str(record["trace"]) for records in lines.values() for record in records if is_span(record)}


def select(lines: Lines, name: str, value: str) -> Lines:
    """The spans of one group's traces (`group_id`) or of one rollout's (`rollout`), and of a rollout's those of the
    traces that it is linked to."""
    spans = {replica: [record for record in records if is_span(record)] for replica, records in lines.items()}
    every = [record for records in spans.values() for record in records]
    wanted = {r["trace"] for r in every if value in (r.get(name), r["trace"] if name == "rollout" else None)}
    if name == "rollout":
        wanted |= {trace for r in every if r["trace"] in wanted for trace, _ in r.get("links", [])}
    return {replica: [record for record in records if record["trace"] in wanted] for replica, records in spans.items()}


def write_traces(run: RunDir) -> Path | None:
    """Write `trace.json` of a run that took any traces. Raises `OSError`, `DiskFull`."""
    lines = read_lines(run)
    if not any(record.get("kind") == SPAN for records in lines.values() for record in records):
        return None
    path = run.path / "trace.json"
    write_events(path, events_of(lines))
    return path


def _parse(arguments: Sequence[str]) -> tuple[str | None, tuple[str, str] | None]:
    """The run, and the attribute and value that are asked for."""
    rest, wanted, reference = list(arguments), None, None
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if name in OPTIONS:
            wanted = OPTIONS[name], value if equals else (rest.pop(0) if rest else "")
            if not wanted[1]:
                raise ConfigError(f"{name} needs a value: {name}={name[2:].upper()}")
        elif argument.startswith("-") or reference is not None:
            raise ConfigError(USAGE.splitlines()[0])
        else:
            reference = argument
    return reference, wanted


def write_events(path: Path, events: Iterator[Event]) -> int:
    """Write a whole trace file; returns how many events it has. Raises `DiskFull`."""
    count = 0
    staged = path.with_name(path.name + ".new")
    with full_disk_named(path), staged.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for event in events:
            file.write((",\n" if count else "") + json.dumps(event))
            count += 1
        file.write("\n]}\n")
    staged.replace(path)
    return count


def events_of(lines: Lines) -> Iterator[Event]:
    """Trace events of the timelines of all replicas."""
    start_s = min((float(r["start_s"]) for records in lines.values() for r in records), default=0.0)
    numbers = itertools.count(FIRST_ROW)
    places: dict[str, Event] = {}
    """Where each span is, for arrows."""
    spans: list[Record] = []
    for process, (name, rows) in enumerate(_processes(lines), start=1):
        yield _named("process_name", process, process, name=name)
        yield _named("process_sort_index", process, process, sort_index=process)
        for row, records in rows:
            number = next(numbers)
            yield _named("thread_name", process, number, name=row)
            yield _named("thread_sort_index", process, number, sort_index=number)
            for record in records:
                event = _slice(record, process, number, start_s)
                yield event
                if is_span(record):
                    places[str(record["span"])] = event
                    spans.append(record)
    yield from _arrows(spans, places)


def _processes(lines: Lines) -> Iterator[tuple[str, list[tuple[str, list[Record]]]]]:
    """Processes with their rows, and what is in each: of the rollouts, in the order of their beginning, then of the
    services."""
    spans = (record for records in lines.values() for record in records if is_span(record))
    names = {str(span["trace"]): str(span["rollout"]) for span in spans if "rollout" in span}
    of_rollouts: dict[str, list[Record]] = {trace: [] for trace in names}
    of_services: dict[str, list[Record]] = {}
    for replica, records in sorted(lines.items()):
        for record in records:
            if is_span(record) and record["trace"] in names:
                of_rollouts[str(record["trace"])].append({**record, "service": replica})
            else:
                of_services.setdefault(replica, []).append(record)
    if of_rollouts:
        begun = sorted(of_rollouts, key=lambda trace: min(float(r["start_s"]) for r in of_rollouts[trace]))
        yield ROLLOUTS, [row for trace in begun for row in _rows(names[trace], of_rollouts[trace])]
    for replica, records in of_services.items():
        busy = [record for record in records if record.get("kind") != SPAN]
        kinds = sorted({str(record.get("kind")) for record in busy})
        work = [(kind, [record for record in busy if str(record.get("kind")) == kind]) for kind in kinds]
        yield replica, [*work, *_rows("spans", [record for record in records if record.get("kind") == SPAN])]


def _rows(name: str, spans: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """As many as have spans at the same time that are not inside each other."""
    rows: dict[int, list[Record]] = {}
    for record, lane in _in_lanes(spans):
        rows.setdefault(lane, []).append(record)
    return [(name if lane == 0 else f"{name} ({lane + 1})", records) for lane, records in rows.items()]


def _named(what: str, process: int, row: int, **arguments: str | int) -> Event:
    """What a process or a row is called, and where it is shown."""
    return {"ph": "M", "name": what, "pid": process, "tid": row, "ts": 0, "args": arguments}


def _slice(record: Record, process: int, row: int, start_s: float) -> Event:
    # Both ends are rounded, not the length: what is inside another stays inside.
    begin_us, end_us = (round((float(record[name]) - start_s) * 1e6, 1) for name in ("start_s", "end_s"))
    return {
        "ph": "X",
        "name": str(record.get("name", record.get("kind"))),
        "cat": "span" if is_span(record) else "work",
        "pid": process,
        "tid": row,
        "ts": begin_us,
        "dur": max(round(end_us - begin_us, 1), 0.0),
        "args": {name: _shown(value) for name, value in record.items() if name not in HIDDEN},
    }


def _shown(value: Any) -> Any:
    """JSON has no number that is not finite."""
    return str(value) if isinstance(value, float) and not is_number(value) else value


def _in_lanes(records: Sequence[Record]) -> Iterator[tuple[Record, int]]:
    """Each in the first row where it is inside what is open there, or after it: slices of a row must nest."""
    lanes: list[list[float]] = []
    for record in sorted(records, key=lambda r: (float(r["start_s"]), -float(r["end_s"]))):
        begin_s, end_s = float(record["start_s"]), float(record["end_s"])
        for lane, ends in enumerate(lanes):
            while ends and ends[-1] <= begin_s:
                ends.pop()
            if not ends or ends[-1] >= end_s:
                ends.append(end_s)
                yield record, lane
                break
        else:
            lanes.append([end_s])
            yield record, len(lanes) - 1


def _arrows(spans: Sequence[Record], places: Mapping[str, Event]) -> Iterator[Event]:
    """From a span to one of another process below it, and once between those that are linked, either way. An arrow that
    ended before it began would be none to Perfetto: it leads from what began earlier."""
    number = 0
    drawn: set[frozenset[int]] = set()
    for record in spans:
        here = places[str(record["span"])]
        parent = places.get(str(record.get("parent", "")))
        others = [("call", parent)] if parent is not None and parent["pid"] != here["pid"] else []
        linked = (places.get(str(span_id)) for _, span_id in record.get("links", []))
        for name, other in [*others, *(("link", event) for event in linked if event is not None)]:
            pair = frozenset((id(here), id(other)))
            if pair in drawn or len(pair) == 1:
                continue
            drawn.add(pair)
            number += 1
            # An arrow lies on the slice that contains its time: the start of each.
            first, second = (here, other) if here["ts"] < other["ts"] else (other, here)
            for phase, event in (("s", first), ("f", second)):
                end = {"bp": "e"} if phase == "f" else {}
                place = {field: event[field] for field in ("pid", "tid", "ts")}
                yield {"ph": phase, "id": number, "name": name, "cat": "flow", **place, **end}
