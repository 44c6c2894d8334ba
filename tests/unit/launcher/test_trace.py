"""`slipstream trace`: one file of what all services wrote."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.common.config import ConfigError
from slipstream.launcher.trace import events_of, trace, write_events

TRACE, STEP = "a" * 32, "b" * 32


def span(name: str, number: int, start_s: float, end_s: float, parent: int = 0, **more: Any) -> dict[str, Any]:
    ids = {"trace": TRACE, "span": f"{number:016x}", **({"parent": f"{parent:016x}"} if parent else {})}
    return {"kind": "span", "start_s": start_s, "end_s": end_s, "name": name, **ids, **more}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    files = {
        "orchestrator": [span("group", 1, 10.0, 12.0, group_id="train-0"), span("queue", 2, 12.0, 13.0, 1)],
        "runner-1": [span("turn", 3, 10.1, 11.9, 1), span("tools", 4, 10.2, 10.6, 3), span("tools", 5, 10.4, 10.9, 3)],
        "decode-1": [{"kind": "decode", "start_s": 10.3, "end_s": 10.5}, span("Decode", 6, 10.2, 11.0, 3)],
        "trainer": [
            {"kind": "train_step", "start_s": 13.0, "end_s": 14.0, "step": 1, "name": "train_step", "trace": STEP,
             "span": "f" * 16, "links": [[TRACE, f"{1:016x}"]]},
        ],
    }  # fmt: skip
    (tmp_path / "timeline").mkdir()
    (tmp_path / "config.toml").write_text("")
    for name, records in files.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / "timeline" / f"{name}.jsonl").write_text(lines)
    with (tmp_path / "timeline" / "runner-1.jsonl").open("a") as file:
        file.write('{"kind": "span", "start_s": 10.0, "end')  # its writer was killed
    return tmp_path


def events(run: Path) -> list[dict[str, Any]]:
    return json.loads((run / "trace.json").read_text())["traceEvents"]


def test_every_service_is_a_process_and_what_a_killed_one_wrote_is_read(run, capsys):
    assert trace([str(run)]) == 0
    assert "2 traces" in capsys.readouterr().out
    found = events(run)
    processes = {event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert processes == {"orchestrator", "runner-1", "decode-1", "trainer"}
    slices = [event for event in found if event["ph"] == "X"]
    assert sorted(event["name"] for event in slices) == [
        *("Decode", "decode", "group", "queue", "tools", "tools", "train_step", "turn"),
    ]
    (group,) = (event for event in slices if event["name"] == "group")
    assert (group["ts"], group["dur"], group["args"]["group_id"]) == (0.0, 2e6, "train-0")


def test_slices_of_a_row_nest(run):
    trace([str(run)])
    rows: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events(run):
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        for begin, end in row:
            assert all(end <= a or b <= begin or (a <= begin and end <= b) or (begin <= a and b <= end) for a, b in row)


def test_arrows_lead_to_who_answered_and_to_the_step_that_trained(run):
    trace([str(run)])
    slices = {(event["pid"], event["tid"], event["ts"]): event["name"] for event in events(run) if event["ph"] == "X"}
    arrows: defaultdict[int, list[str]] = defaultdict(list)
    for event in events(run):
        if event["ph"] in "sf":
            arrows[event["id"]].append(slices[event["pid"], event["tid"], event["ts"]])
    assert sorted(arrows.values()) == [["group", "train_step"], ["group", "turn"], ["turn", "Decode"]]


def test_a_group_can_be_asked_for_alone(run):
    trace([str(run), "--group", "train-0"])
    assert {event["args"]["trace"] for event in events(run) if event["ph"] == "X"} == {TRACE}
    with pytest.raises(ConfigError, match="no trace of 'train-1'"):
        trace([str(run), "--group=train-1"])


def strictly(path: Path) -> dict[str, Any]:
    """A file as a reader takes it that knows JSON alone: no NaN, no name twice, nothing that is not UTF-8."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({name for name, _ in pairs}) == len(pairs)
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(path.read_bytes().decode("utf-8"), parse_constant=refuse, object_pairs_hook=once)


def check_format(document: dict[str, Any]) -> None:
    """What Chrome's trace event format, and Perfetto's reading of it, ask of a file: fields, nesting, arrows."""
    assert document["displayTimeUnit"] in ("ms", "ns")
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    named: set[int] = set()
    for event in document["traceEvents"]:
        assert event["ph"] in ("X", "M", "s", "f")
        assert isinstance(event["name"], str)
        assert event["name"]
        assert all(isinstance(event[name], int) and event[name] >= 0 for name in ("pid", "tid"))
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            named.add(event["pid"])
            continue
        assert isinstance(event["cat"], str)
        assert event["ts"] >= 0
        assert event["pid"] in named, "a process has its name before its slices"
        begin_ns = round(event["ts"] * 1000)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["args"], dict)
            slices[event["pid"], event["tid"]].append((begin_ns, begin_ns + round(event["dur"] * 1000)))
        else:
            arrows[event["id"]].append({**event, "at_ns": begin_ns})
    for row in slices.values():
        open_ends: list[int] = []
        for begin, end in sorted(row, key=lambda each: (each[0], -each[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], "a slice ends before what is inside it"
            open_ends.append(end)
    for start, finish in arrows.values():
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        for end in (start, finish):
            row = slices[end["pid"], end["tid"]]
            assert any(begin <= end["at_ns"] <= ending for begin, ending in row), "an arrow lies on a slice"


def test_the_file_is_what_perfetto_reads(run):
    trace([str(run)])
    check_format(strictly(run / "trace.json"))


moments = st.floats(0, 5, allow_subnormal=False)


@st.composite
def timelines(draw: st.DrawFn) -> dict[str, list[dict[str, Any]]]:
    """Spans of any length, in any process, below any other; each kind of work one after the other."""
    files: dict[str, list[dict[str, Any]]] = {"a": [], "b": [], "c": []}
    for number in range(1, draw(st.integers(0, 12)) + 1):
        begin_s, length_s = 1.7e9 + draw(moments), draw(moments)
        parent = draw(st.integers(0, number - 1))
        files[draw(st.sampled_from("abc"))].append(span(f"s{number}", number, begin_s, begin_s + length_s, parent))
    for name, lengths in zip("abc", draw(st.lists(st.lists(moments, max_size=3), min_size=3, max_size=3)), strict=True):
        at_s = 1.7e9
        for length_s in lengths:
            files[name].append({"kind": "work", "start_s": at_s, "end_s": at_s + length_s})
            at_s += length_s
    return files


@settings(max_examples=60, deadline=None, derandomize=True)
@given(timelines())
def test_whatever_services_did_makes_a_file_that_perfetto_reads(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_events(path, events_of(lines))
    check_format(strictly(path))
