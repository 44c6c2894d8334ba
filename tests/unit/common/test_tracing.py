"""Spans: which are recorded, how they hang together, where they go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from slipstream.api.training.v1 import batch_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common import tracing
from slipstream.common.otlp import QUEUE_SPANS, OtlpExport
from slipstream.common.timeline import TimelineFile
from slipstream.common.tracing import Span, TraceContext, Tracer
from tests.otlp_collector import collector

CONTEXT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


@pytest.fixture
def lines(tmp_path) -> Iterator[Path]:
    """The file of a process that traces everything."""
    path = tmp_path / "timeline" / "runner-1.jsonl"
    tracing.use(Tracer("run", 1.0, TimelineFile(path)))
    yield path
    tracing.use(Tracer("", 0.0))


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def span_named(name: str) -> Span:
    return Span(name, CONTEXT, "", 1.0, 2.0, [CONTEXT], {"replica": "decode-1", "tokens": 3})


def test_without_a_share_nothing_is_recorded_or_sent_along(tmp_path):
    tracing.use(Tracer("run", 0.0, TimelineFile(tmp_path / "a.jsonl")))
    trace = tracing.group_trace("train-1", 1, 1)
    with tracing.span("turn", trace):
        assert tracing.traceparent() is None
    tracing.record_between("group", trace, 1.0, 2.0, root=True)
    assert (trace, tracing.step_trace("1.1"), list(tmp_path.iterdir())) == (None, None, [])
    assert tracing.parse(f"00-{CONTEXT.trace_id}-{CONTEXT.span_id}-01") is None


def test_the_share_of_traced_groups_is_the_same_choice_in_every_process():
    chosen = []
    for _ in range(2):
        tracing.use(Tracer("run", 0.25))
        chosen.append([n for n in range(2000) if tracing.group_trace(f"train-{n}", 1, 1)])
    tracing.use(Tracer("", 0.0))
    assert chosen[0] == chosen[1]
    assert 400 < len(chosen[0]) < 600


def test_spans_inside_another_and_calls_made_there_belong_to_it(lines):
    trace = tracing.group_trace("train-1", 1, 2)
    assert trace is not None
    called = []

    def fail() -> None:
        called.append(tracing.parse(tracing.traceparent() or ""))
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), tracing.span("run", trace), tracing.span("turn", of=trace, samples=8):
        fail()
    tracing.record_between("group", trace, 1.0, 1.5, root=True, group_id="train-1")
    assert tracing.traceparent() is None
    turn, run, group = read(lines)
    assert {record["trace"] for record in (turn, run, group)} == {trace.trace_id}
    assert called == [(trace.trace_id, turn["span"])]
    assert (turn["parent"], run["parent"], group["span"]) == (run["span"], group["span"], trace.span_id)
    assert "parent" not in group
    assert (turn["samples"], turn["error"], run["error"], group["group_id"]) == (
        8,
        "ValueError",
        "ValueError",
        "train-1",
    )
    assert all(record["start_s"] <= record["end_s"] for record in (turn, run, group))


def test_each_rollout_has_a_trace_of_its_own_which_every_process_knows_and_its_group_decides(lines):
    def known() -> list[TraceContext | None]:
        names = [
            (f"train-{n}", incarnation, attempt) for n in range(40) for incarnation in (1, 2) for attempt in (1, 2)
        ]
        groups = [tracing.group_trace(*name) for name in names]
        rollouts = [[tracing.rollout_trace(*name, index) for index in range(4)] for name in names]
        for group, members in zip(groups, rollouts, strict=True):
            assert {member is None for member in members} == {group is None}
        return [*groups, *(member for members in rollouts for member in members)]

    tracing.use(Tracer("run", 0.5))
    first = known()
    tracing.use(Tracer("run", 0.5))
    assert known() == first
    ids = [trace.trace_id for trace in first if trace is not None]
    assert len(set(ids)) == len(ids) > 100
    assert tracing.trace_id(None) == ""
    tracing.use(Tracer("another", 1.0))
    assert set(ids).isdisjoint(tracing.trace_id(trace) for trace in known())


def test_a_block_of_a_rollout_is_in_its_trace_also_within_its_groups(lines):
    group = tracing.group_trace("train-1", 1, 1)
    mine, other = (tracing.rollout_trace("train-1", 1, 1, index) for index in (0, 1))
    assert mine is not None
    with tracing.span("run", group):
        with tracing.span("turn", mine), tracing.span("prefill"), tracing.span("decode", mine):
            pass
        with tracing.span("turn", other):
            pass
    tracing.use(Tracer("", 0.0))
    decode, prefill, turn, others, _ = read(lines)
    assert [each["trace"] for each in (decode, prefill, turn)] == [mine.trace_id] * 3
    assert (decode["parent"], prefill["parent"]) == (prefill["span"], turn["span"])
    assert (turn["parent"], tracing.trace_id(other)) == (mine.span_id, others["trace"])


def test_what_rollouts_share_is_in_each_ones_trace_and_linked_to_the_groups(lines):
    group = tracing.group_trace("train-1", 1, 1)
    known = {f"train-1.1.{index}": tracing.rollout_trace("train-1", 1, 1, index) for index in range(3)}
    roots = {name: root for name, root in known.items() if root is not None}
    assert roots == known

    def sample() -> None:
        with tracing.span("turn", group, roots, samples=3) as turn:
            for name, place in turn.copies.items():
                tracing.record_between("decode", place, 1.0, 2.5, rollout=name)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        sample()
    tracing.use(Tracer("", 0.0))
    *decodes, shared, first, second, third = read(lines)
    assert "rollout" not in shared
    for copy, decode, (name, root) in zip((first, second, third), decodes, roots.items(), strict=True):
        assert (copy["name"], copy["trace"], copy["parent"]) == ("turn", root.trace_id, root.span_id)
        assert (copy["links"], copy["rollout"]) == ([[shared["trace"], shared["span"]]], name)
        assert (copy["samples"], copy["error"]) == (3, "ValueError")
        assert (copy["start_s"], copy["end_s"]) == (shared["start_s"], shared["end_s"])
        assert (decode["trace"], decode["parent"]) == (root.trace_id, copy["span"])
        assert (decode["start_s"], decode["end_s"]) == (1.0, 2.5)
    with tracing.span("turn", None, {}) as nothing:
        assert dict(nothing.copies) == {}


def test_the_rollouts_of_plans_are_named_once_however_many_samples_they_have(lines):
    sequences = [
        batch_pb2.PlannedSequence(rollout_id=f"train-7.2.{index}", group_id="train-7", sample_number=number,
                                  dispatch_version=types_pb2.PolicyVersion(incarnation=3, step=5))
        for index, number in ((0, 0), (0, 1), (4, 0))
    ]  # fmt: skip
    plans = [
        batch_pb2.Plan(micro_batches=[batch_pb2.MicroBatch(sequences=part)]) for part in (sequences, sequences[:1])
    ]
    assert tracing.planned_rollouts(plans) == [("train-7", 3, 2, 0), ("train-7", 3, 2, 4)]
    odd = [batch_pb2.PlannedSequence(rollout_id=name) for name in ("", "odd", "train-7.2.x", "train-7.-1.0")]
    assert tracing.planned_rollouts([batch_pb2.Plan(micro_batches=[batch_pb2.MicroBatch(sequences=odd)])]) == []
    tracing.use(Tracer("", 0.0))
    assert tracing.planned_rollouts(plans) == []


def test_a_directory_that_cannot_be_written_ends_the_spans_and_nothing_else(tmp_path, lines):
    lines.parent.write_text("in the way")
    trace = tracing.group_trace("train-1", 1, 1)
    for _ in range(2):
        with tracing.span("turn", trace):
            pass
    assert lines.parent.read_text() == "in the way"


@pytest.mark.parametrize("header", ["", "00-1-2-01", b"00-00", f"00-{CONTEXT.trace_id}-{CONTEXT.span_id}-00"])
def test_a_header_that_is_none_or_of_what_is_not_recorded_begins_no_trace(lines, header):
    assert tracing.parse(header) is None


def test_a_collector_is_sent_the_spans_with_their_links():
    with collector() as (endpoint, got):
        export = OtlpExport(endpoint, {"service.name": "decode"})
        export.put(span_named("decode"))
        export.close()
        export._thread.join(30.0)
    assert (export.sent_count, export.dropped_count) == (1, 0)
    (resource,) = got[0].resource_spans
    assert [(a.key, a.value.string_value) for a in resource.resource.attributes] == [("service.name", "decode")]
    (span,) = resource.scope_spans[0].spans
    assert (span.name, span.trace_id.hex(), span.span_id.hex()) == ("decode", *CONTEXT)
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (10**9, 2 * 10**9)
    assert [(link.trace_id.hex(), link.span_id.hex()) for link in span.links] == [CONTEXT]
    assert {a.key: a.value.string_value or a.value.int_value for a in span.attributes} == {
        "replica": "decode-1",
        "tokens": 3,
    }


def test_spans_that_find_no_place_in_the_queue_are_told_of_though_the_collector_takes_all_others():
    with capture_logs() as logs, collector() as (endpoint, _):
        export = OtlpExport(endpoint, {"service.name": "decode"})
        for _ in range(QUEUE_SPANS + 50):
            export.put(span_named("decode"))
        export.close()
        export._thread.join(30.0)
    assert export.dropped_count > 0
    assert export.sent_count + export.dropped_count == QUEUE_SPANS + 50
    assert [entry["dropped"] for entry in logs if entry["event"] == "spans_not_exported"] == [export.dropped_count]


def test_a_collector_that_is_gone_costs_its_spans_alone(lines):
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        port = server.server_port
    export = OtlpExport(f"http://127.0.0.1:{port}", {"service.name": "decode"})
    tracing.use(Tracer("run", 1.0, TimelineFile(lines), export))
    trace = tracing.group_trace("train-1", 1, 1)
    for _ in range(QUEUE_SPANS + 600):  # more than the queue and a batch hold
        tracing.record("turn", trace, 0.1)
    tracing.close()
    export._thread.join(30.0)
    assert not export._thread.is_alive()
    assert export.sent_count == 0
    assert export.dropped_count > 0
    assert len(read(lines)) == QUEUE_SPANS + 600
