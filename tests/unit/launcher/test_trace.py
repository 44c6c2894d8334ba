"""`slipstream trace`: one file of what all services wrote."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.common.config import ConfigError
from slipstream.launcher.report import write_report
from slipstream.launcher.rundir import RunDir
from slipstream.launcher.trace import events_of, trace, write_events

TRACE, STEP, ROLLOUT, SIBLING = "a" * 32, "b" * 32, "c" * 32, "d" * 32
NAME = "train-0.1.0"


def span(name: str, number: int, start_s: float, end_s: float, parent: int = 0, **more: Any) -> dict[str, Any]:
    ids = {"trace": TRACE, "span": f"{number:016x}", **({"parent": f"{parent:016x}"} if parent else {})}
    return {"kind": "span", "start_s": start_s, "end_s": end_s, "name": name, **ids, **more}


def lives(trace: str, name: str, first: int) -> dict[str, list[dict[str, Any]]]:
    """A rollout that shared its first turn and took another, by service."""
    of: dict[str, Any] = {"trace": trace, "rollout": name}
    step = [[STEP, "f" * 16]]
    return {
        "orchestrator": [
            span("rollout", first, 10.0, 12.0, group_id="train-0", links=[[TRACE, f"{1:016x}"]], **of),
            span("queue", first + 1, 12.0, 13.0, first, **of),
            span("training", first + 2, 12.9, 14.1, first, links=step, **of),
        ],
        "runner-1": [
            span("turn", first + 3, 10.1, 11.0, first, links=[[TRACE, f"{3:016x}"]], **of),
            span("decode", first + 4, 10.2, 10.9, first + 3, **of),
            span("turn", first + 5, 11.2, 11.9, first, **of),
        ],
        "decode-1": [span("Decode", first + 6, 11.3, 11.8, first + 5, trace=trace)],
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    mine, other = lives(ROLLOUT, NAME, 16), lives(SIBLING, "train-0.1.1", 32)
    files = {
        "orchestrator": [span("group", 1, 10.0, 12.0, group_id="train-0"), span("queue", 2, 12.0, 13.0, 1)],
        "runner-1": [span("turn", 3, 10.1, 11.9, 1), span("tools", 4, 10.2, 10.6, 3), span("tools", 5, 10.4, 10.9, 3)],
        "decode-1": [{"kind": "decode", "start_s": 10.3, "end_s": 10.5}, span("Decode", 6, 10.2, 11.0, 3)],
        "trainer": [
            {"kind": "train_step", "start_s": 13.0, "end_s": 14.0, "step": 1, "name": "train_step", "trace": STEP,
             "span": "f" * 16, "links": [[ROLLOUT, f"{16:016x}"]]},
        ],
    }  # fmt: skip
    for each in (mine, other):
        for name, records in each.items():
            files[name] += records
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


def slices_of(found: list[dict[str, Any]], process: str) -> list[dict[str, Any]]:
    pids = {event["args"]["name"]: event["pid"] for event in found if event["name"] == "process_name"}
    return [event for event in found if event["ph"] == "X" and event["pid"] == pids[process]]


def test_every_service_is_a_process_and_what_a_killed_one_wrote_is_read(run, capsys):
    assert trace([str(run)]) == 0
    assert "4 traces" in capsys.readouterr().out
    found = events(run)
    processes = {event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert processes == {"rollouts", "orchestrator", "runner-1", "decode-1", "trainer"}
    names = [event["name"] for service in processes - {"rollouts"} for event in slices_of(found, service)]
    assert sorted(names) == ["Decode", "decode", "group", "queue", "tools", "tools", "train_step", "turn"]
    (group,) = (event for event in slices_of(found, "orchestrator") if event["name"] == "group")
    assert (group["ts"], group["dur"], group["args"]["group_id"]) == (0.0, 2e6, "train-0")


def test_the_life_of_a_rollout_is_in_rows_that_are_called_like_it(run):
    trace([str(run)])
    found = events(run)
    names = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    rows: defaultdict[str, list[str]] = defaultdict(list)
    for event in slices_of(found, "rollouts"):
        rows[names[event["tid"]]].append(event["name"])
        assert event["args"]["service"] in ("orchestrator", "runner-1", "decode-1")
    of_one = ["rollout", "turn", "decode", "turn", "Decode", "queue"]
    # A queue that ends after training began, as clocks may tell it, has the other in a row of its own.
    assert rows == {NAME: of_one, f"{NAME} (2)": ["training"], "train-0.1.1": of_one, "train-0.1.1 (2)": ["training"]}


def test_a_line_that_is_no_span_is_nobodys_whatever_it_says(run):
    with (run / "timeline" / "trainer.jsonl").open("a") as file:
        for more in ({}, {"trace": "e" * 32}):
            file.write(json.dumps({"kind": "span", "start_s": 13.0, "end_s": 14.0, "rollout": "x.1.0", **more}) + "\n")
    trace([str(run)])
    names = {event["args"]["name"] for event in events(run) if event["name"] == "thread_name"}
    assert "x.1.0" not in names
    assert NAME in names


def test_slices_of_a_row_nest(run):
    trace([str(run)])
    rows: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events(run):
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        for begin, end in row:
            assert all(end <= a or b <= begin or (a <= begin and end <= b) or (begin <= a and b <= end) for a, b in row)


def test_arrows_lead_to_who_answered_and_to_what_is_linked_and_never_back_in_time(run):
    trace([str(run)])
    slices = {(event["pid"], event["tid"], event["ts"]): event["name"] for event in events(run) if event["ph"] == "X"}
    arrows: defaultdict[int, list[str]] = defaultdict(list)
    for event in events(run):
        if event["ph"] in "sf":
            arrows[event["id"]].append(slices[event["pid"], event["tid"], event["ts"]])
    links = [["group", "rollout"], ["training", "train_step"], ["turn", "turn"]] * 2
    assert sorted(arrows.values()) == sorted(
        [["group", "turn"], ["turn", "Decode"], ["rollout", "train_step"], *links]
    )  # fmt: skip


STRANGE: list[dict[str, Any]] = [
    {"start_s": float("nan")}, {"end_s": float("inf")}, {"start_s": 10**400}, {"start_s": None}, {"end_s": "late"},
    {"trace": []}, {"trace": None}, {"span": 3}, {"parent": {}}, {"rollout": 7},
    {"links": None}, {"links": [1]}, {"links": [["a"]]}, {"links": [[[], "b"]]}, {"links": "ab"},
]  # fmt: skip


@pytest.mark.parametrize("of", [(), ("--rollout", NAME), ("--group", "train-0")])
@pytest.mark.parametrize("strange", STRANGE, ids=json.dumps)
def test_a_line_that_no_service_writes_is_left_out(run, strange, of):
    trace([str(run), *of])
    before = events(run)
    with (run / "timeline" / "trainer.jsonl").open("a") as file:
        line = span("strange", 99, 13.1, 13.2, rollout=NAME, group_id="train-0", links=[[TRACE, f"{1:016x}"]])
        file.write(json.dumps({**line, **strange}) + "\n")
    trace([str(run), *of])
    assert events(run) == before
    assert write_report(RunDir(run)).exists()


def test_a_rollouts_name_without_a_trace_and_a_figure_that_is_none_make_a_file(run):
    with (run / "timeline" / "trainer.jsonl").open("a") as file:
        line = {"kind": "odd", "start_s": 13.1, "end_s": 13.2, "rollout": NAME, "loss": float("nan")}
        file.write(json.dumps(line) + "\n")
    trace([str(run)])
    (odd,) = (event for event in events(run) if event["name"] == "odd")
    assert odd["args"] == {"rollout": NAME, "loss": "nan"}


def test_a_group_can_be_asked_for_alone(run):
    trace([str(run), "--group", "train-0"])
    found = {event["args"]["trace"] for event in events(run) if event["ph"] == "X"}
    assert found == {TRACE, ROLLOUT, SIBLING}
    with pytest.raises(ConfigError, match="no trace of 'train-1'"):
        trace([str(run), "--group=train-1"])


@pytest.mark.parametrize("named", [NAME, ROLLOUT])
def test_a_rollout_can_be_asked_for_alone_and_brings_what_it_is_linked_to(run, named):
    trace([str(run), "--rollout", named])
    assert {event["args"]["trace"] for event in events(run) if event["ph"] == "X"} == {ROLLOUT, TRACE, STEP}
    check_format(strictly(run / "trace.json"))
    for wrong in (("--rollout", "train-0.1.9"), ("--rollout=" + "0" * 32,)):
        with pytest.raises(ConfigError, match="no trace of"):
            trace([str(run), *wrong])
    with pytest.raises(ConfigError, match="--rollout needs a value"):
        trace([str(run), "--rollout"])


def strictly(path: Path) -> dict[str, Any]:
    """A file as a reader takes it that knows JSON alone: no NaN, no name twice, nothing that is not UTF-8."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({name for name, _ in pairs}) == len(pairs)
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(path.read_bytes().decode("utf-8"), parse_constant=refuse, object_pairs_hook=once)


def check_format(document: dict[str, Any]) -> None:
    """What Chrome's trace event format, and Perfetto's reading of it, ask of a file.

    Every event has `ph`, `ts` (microseconds), `pid`, `tid` and `name`. Slices ("X") have a `dur`, and those of a row
    nest. Metadata ("M") names each process and row once, before its slices; rows are named by `tid` alone, so one is of
    no two processes, and is no `pid`. An arrow is an "s" and an "f" of one `id`, `cat` and `name`, the "f" bound to the
    slice around it and not before the "s"; each lies on the slice of its row that begins there.
    """
    assert document["displayTimeUnit"] in ("ms", "ns")
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    arrows: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    named: dict[tuple[str, int], str | int] = {}
    processes: dict[int, int] = {}
    for event in document["traceEvents"]:
        assert event["ph"] in ("X", "M", "s", "f")
        assert isinstance(event["name"], str)
        assert event["name"]
        assert all(type(event[name]) is int and event[name] >= 0 for name in ("pid", "tid"))
        assert type(event["ts"]) in (int, float)
        assert event["ts"] >= 0
        if event["ph"] == "M":
            of_process = event["name"].startswith("process_")
            what, kind = event["name"].partition("_")[::2]
            assert (what, kind) in {(w, k) for w in ("process", "thread") for k in ("name", "sort_index")}
            assert isinstance(event["args"][kind], str if kind == "name" else int)
            of = event["name"], event["pid"] if of_process else event["tid"]
            assert of not in named, "a process or a row is named once"
            named[of] = event["args"][kind]
            if not of_process:
                processes[event["tid"]] = event["pid"]
            continue
        assert isinstance(event["cat"], str)
        assert named["process_name", event["pid"]], "a process has its name before its slices"
        assert named["thread_name", event["tid"]], "so does a row"
        assert processes[event["tid"]] == event["pid"], "a row is of one process"
        begin_ns = round(event["ts"] * 1000)
        if event["ph"] == "X":
            assert type(event["dur"]) in (int, float)
            assert event["dur"] >= 0
            assert isinstance(event["args"], dict)
            slices[event["pid"], event["tid"]].append((begin_ns, begin_ns + round(event["dur"] * 1000)))
        else:
            assert type(event["id"]) is int
            arrows[event["id"], event["cat"], event["name"]].append({**event, "at_ns": begin_ns})
    assert processes.keys().isdisjoint(processes.values()), "no row has the number of a process"
    for row in slices.values():
        open_ends: list[int] = []
        for begin, end in sorted(row, key=lambda each: (each[0], -each[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], "a slice ends before what is inside it"
            open_ends.append(end)
    for ends in arrows.values():
        assert [end["ph"] for end in ends] == ["s", "f"], "an arrow has two ends"
        start, finish = ends
        assert finish["bp"] == "e"
        assert start["at_ns"] <= finish["at_ns"], "an arrow does not end before it begins"
        for end in (start, finish):
            row = slices[end["pid"], end["tid"]]
            assert any(begin == end["at_ns"] for begin, _ in row), "an arrow lies on a slice"


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda event: event.pop(name)


def set_to(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda event: event.update({name: value})


BROKEN = [
    *((phase, without(name)) for phase in "XMsf" for name in ("ph", "ts", "pid", "tid", "name")),
    *(("X", change) for change in (without("dur"), without("cat"), without("args"), set_to("dur", -1.0))),
    *(("X", change) for change in (set_to("ts", "0"), set_to("ts", -1), set_to("pid", 999), set_to("tid", 7))),
    *(("X", change) for change in (set_to("ph", "Q"), set_to("name", ""), set_to("tid", 1.5), set_to("dur", 5e5))),
    *(("M", change) for change in (without("args"), set_to("args", {}), set_to("name", "thread"), set_to("pid", 2))),
    *(("s", change) for change in (without("id"), set_to("id", 999), set_to("ts", 9e6), set_to("cat", "other"))),
    *(("f", change) for change in (without("bp"), set_to("ts", 50.0), set_to("name", "other"), set_to("tid", 1002))),
]


@pytest.mark.parametrize(("phase", "breaks"), BROKEN)
def test_a_file_that_is_broken_somewhere_is_none(run, phase, breaks):
    trace([str(run)])
    document = strictly(run / "trace.json")
    check_format(document)
    breaks(next(event for event in document["traceEvents"] if event["ph"] == phase))
    with pytest.raises((AssertionError, KeyError)):
        check_format(document)


def test_a_file_with_an_arrow_back_in_time_or_a_row_of_two_processes_is_none(run):
    trace([str(run)])
    document = strictly(run / "trace.json")
    ends = [event for event in document["traceEvents"] if event["ph"] in "sf"]
    start, finish = next(pair for pair in zip(ends[::2], ends[1::2], strict=True) if pair[0]["ts"] < pair[1]["ts"])
    places = [{name: end[name] for name in ("ts", "pid", "tid")} for end in (start, finish)]
    start.update(places[1])
    finish.update(places[0])
    with pytest.raises(AssertionError, match="before it begins"):
        check_format(document)
    start.update(places[0])
    finish.update(places[1])
    check_format(document)
    document["traceEvents"].append(
        {"ph": "M", "name": "thread_name", "pid": 2, "tid": 1001, "ts": 0, "args": {"name": "x"}}
    )
    with pytest.raises(AssertionError, match="named once"):
        check_format(document)


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
