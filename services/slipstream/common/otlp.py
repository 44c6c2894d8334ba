"""Spans to an OpenTelemetry collector, as OTLP over HTTP. Needs the extra `tracing`.

| thread | takes | waits for | who unblocks it |
|---|---|---|---|
| otlp | spans, some hundred at a time | a span, its clock; the collector, for `TIMEOUT_S` at most | `put`; time |

A collector that is slow, or gone, costs the spans that do not fit the queue, and nothing else.
"""

from __future__ import annotations

import importlib
import logging
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

import structlog

from slipstream.common.config import ConfigError
from slipstream.common.extras import explain
from slipstream.common.tracing import Span, TraceContext

log = structlog.get_logger()

QUEUE_SPANS = 4096
BATCH_SPANS = 512
PERIOD_S = 1.0
TIMEOUT_S = 5.0
CLOSE_S = 1.0
WARNED_EVERY_S = 60.0
PROCESS = "service.name", "service.instance.id"


class OtlpExport:
    """A queue and the thread that empties it."""

    def __init__(self, endpoint: str, resource: Mapping[str, str]) -> None:
        """`endpoint`: of the collector, such as http://127.0.0.1:4318. Raises `ConfigError` where the extra lacks."""
        try:
            self._trace = importlib.import_module("opentelemetry.trace")
            self._sdk = importlib.import_module("opentelemetry.sdk.trace")
            resources = importlib.import_module("opentelemetry.sdk.resources")
            exporters = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        except ModuleNotFoundError as error:
            raise ConfigError(explain("tracing.otlp_endpoint", [str(error.name)], "tracing")) from None
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # of a collector that is gone, we tell ourselves
        self._resources = resources
        self._own = dict(resource)
        self._by_process: dict[tuple[str, str] | None, Any] = {}
        """One a process that spans come from: this one, and those it brings spans of, of which it has few."""
        self._exporter: Any = exporters.OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=TIMEOUT_S)
        self._done = importlib.import_module("opentelemetry.sdk.trace.export").SpanExportResult.SUCCESS
        self._queue: queue.Queue[Span] = queue.Queue(QUEUE_SPANS)
        self._closing = threading.Event()
        self.dropped_count = 0
        self.sent_count = 0
        self._warned_s = -WARNED_EVERY_S
        self._told_count = 0
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def put(self, span: Span) -> None:
        """Queue a span; one that finds no room is dropped and counted."""
        try:
            self._queue.put_nowait(span)
        except queue.Full:
            self.dropped_count += 1

    def close(self) -> None:
        """Send what is left, for `CLOSE_S` at most."""
        self._closing.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._exporter.shutdown()  # it would try for longer

    def _run(self) -> None:
        while True:
            closing = self._closing.wait(PERIOD_S)
            while batch := self._batch():
                if self._exporter.export([self._readable(span) for span in batch]) is self._done:
                    self.sent_count += len(batch)
                    self._warn()
                else:
                    self.dropped_count += len(batch)
                    self._warn()
                    if self._closing.is_set():
                        return
            if closing:
                return

    def _batch(self) -> list[Span]:
        batch: list[Span] = []
        try:
            while len(batch) < BATCH_SPANS:
                batch.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return batch

    def _warn(self) -> None:
        """Say how many spans were lost, where that is news: for want of a place in the queue, too."""
        dropped = self.dropped_count
        if dropped > self._told_count and time.monotonic() - self._warned_s >= WARNED_EVERY_S:
            self._warned_s, self._told_count = time.monotonic(), dropped
            log.warning("spans_not_exported", dropped=dropped, sent=self.sent_count)

    def _readable(self, span: Span) -> Any:
        """The SDK's own form of a span."""
        parent_id = span.parent_id
        return self._sdk.ReadableSpan(
            span.name,
            context=self._context(span.context),
            parent=self._context(TraceContext(span.context.trace_id, parent_id)) if parent_id else None,
            resource=self._resource(span.process),
            attributes={
                name: v if isinstance(v, bool | int | float) else str(v) for name, v in span.attributes.items()
            },
            links=[self._trace.Link(self._context(link)) for link in span.links],
            start_time=round(span.start_s * 1e9),
            end_time=round(span.end_s * 1e9),
        )

    def _resource(self, process: tuple[str, str] | None) -> Any:
        if process not in self._by_process:
            named = {} if process is None else dict(zip(PROCESS, process, strict=True))
            self._by_process[process] = self._resources.Resource({**self._own, **named})
        return self._by_process[process]

    def _context(self, context: TraceContext) -> Any:
        flags = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED)
        return self._trace.SpanContext(int(context.trace_id, 16), int(context.span_id, 16), True, flags)
