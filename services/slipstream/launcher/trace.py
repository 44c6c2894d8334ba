"""`slipstream trace [RUN]`: one file of all that the services of a run wrote into `timeline/`.

Chrome's JSON trace events, which Perfetto opens as well. Each service is a process there. Its intervals of work have a
row for each kind; spans of traces fill as many rows as run at the same time, what is inside another below it. Arrows
lead from a call to whoever answered it, and from a group to the step that trained it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.common.config import ConfigError
from slipstream.common.disk import full_disk_named
from slipstream.common.tracing import SPAN
from slipstream.launcher.records import Record, is_span, read_all
from slipstream.launcher.rundir import RunDir, find_services_run, shown

USAGE = """\
usage: slipstream trace [RUN] [--group GROUP]

Write runs/RUN/trace.json, which https://ui.perfetto.dev and chrome://tracing open: what each service did when, and the
traces of single groups if the run was told to take some (tracing.sample_share); such a run writes it at its end by
itself. Works while the run goes on, after it, and after its processes were killed. RUN is a name in runs/ or a path;
without it, the newest run is meant.

  --group GROUP   the traces of one group alone, such as train-12
"""
BUSY_LANE = 1
SPAN_LANE = 100
"""First row of spans; rows below are of intervals."""
HIDDEN = frozenset({"kind", "name", "start_s", "end_s", "parent", "links"})
Event = dict[str, Any]


def trace(arguments: Sequence[str]) -> int:
    """Run the command. Raises `ConfigError` or `RunDirError` for what it cannot make sense of."""
    reference, group_id = _parse(arguments)
    run = find_services_run(reference)
    path = run.path / "trace.json"
    lines = {file.stem: _timed(read_all(file)) for file in sorted((run.path / "timeline").glob("*.jsonl"))}
    spans = {name: [record for record in records if is_span(record)] for name, records in lines.items()}
    if group_id is not None:
        wanted = {r["trace"] for records in spans.values() for r in records if r.get("group_id") == group_id}
        if not wanted:
            raise ConfigError(f"{run.name}: no trace of {group_id!r}; tracing.sample_share says how many are taken")
        lines = spans = {name: [r for r in records if r["trace"] in wanted] for name, records in spans.items()}
    count = write_events(path, events_of(lines))
    traces = len({record["trace"] for records in spans.values() for record in records})
    print(f"{shown(path)}: {count} events, {traces} traces")
    return 0


def write_traces(run: RunDir) -> Path | None:
    """Write `trace.json` of a run that took any traces. Raises `OSError`, `DiskFull`."""
    lines = {file.stem: _timed(read_all(file)) for file in sorted((run.path / "timeline").glob("*.jsonl"))}
    if not any(record.get("kind") == SPAN for records in lines.values() for record in records):
        return None
    path = run.path / "trace.json"
    write_events(path, events_of(lines))
    return path


def _parse(arguments: Sequence[str]) -> tuple[str | None, str | None]:
    rest, group_id, reference = list(arguments), None, None
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if name == "--group":
            group_id = value if equals else (rest.pop(0) if rest else "")
            if not group_id:
                raise ConfigError("--group needs a value: --group=GROUP")
        elif argument.startswith("-") or reference is not None:
            raise ConfigError(USAGE.splitlines()[0])
        else:
            reference = argument
    return reference, group_id


def _timed(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if all(isinstance(r.get(name), int | float) for name in ("start_s", "end_s"))]


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


def events_of(lines: Mapping[str, Sequence[Record]]) -> Iterator[Event]:
    """Trace events of the timelines of all replicas."""
    start_s = min((float(r["start_s"]) for records in lines.values() for r in records), default=0.0)
    places: dict[str, Event] = {}
    """Where each span is, for arrows."""
    spans: list[Record] = []
    for process, (replica, records) in enumerate(sorted(lines.items()), start=1):
        if not records:
            continue
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": replica}}
        own = [record for record in records if record.get("kind") == SPAN]
        busy = [record for record in records if record.get("kind") != SPAN]
        rows = {kind: BUSY_LANE + row for row, kind in enumerate(sorted({str(r.get("kind")) for r in busy}))}
        for kind, row in rows.items():
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": kind}}
        placed = [(record, rows[str(record.get("kind"))]) for record in busy]
        placed += [(record, SPAN_LANE + lane) for record, lane in _in_lanes(own)]
        for record, row in placed:
            event = _slice(record, process, row, start_s)
            yield event
            if is_span(record):
                places[str(record["span"])] = event
                spans.append(record)
    yield from _arrows(spans, places)


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
        "args": {name: value for name, value in record.items() if name not in HIDDEN},
    }


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
    """From a span to one of another process below it, and between those that are linked."""
    number = 0
    for record in spans:
        here = places[str(record["span"])]
        parent = places.get(str(record.get("parent", "")))
        sources = [parent] if parent is not None and parent["pid"] != here["pid"] else []
        linked = (places.get(str(span_id)) for _, span_id in record.get("links", []))
        for source in [*sources, *(event for event in linked if event is not None)]:
            number += 1
            # An arrow lies on the slice that contains its time: the start of each.
            for phase, event in (("s", source), ("f", here)):
                end = {"bp": "e"} if phase == "f" else {}
                place = {name: event[name] for name in ("pid", "tid", "ts")}
                yield {"ph": phase, "id": number, "name": "call", "cat": "flow", **place, **end}
