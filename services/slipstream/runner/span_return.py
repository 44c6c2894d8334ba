"""Spans of an environment's process, on their way to the runner: the process writes no file and knows no collector.

Each request of the runner carries the trace that it belongs to; spans made under it go back as lines of `spans`, just
before the answer, those that end in between after `PERIOD_S`. Nothing waits for the runner to take them: what finds no
room is dropped, and how many were is in the next line.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from typing import Any, NoReturn

from slipstream.common.config import TracingConfig
from slipstream.common.tracing import Span, Tracer, use
from slipstream.runner import otel_bridge
from slipstream.runner.span_text import row_of

QUEUE_SPANS = 2048
BATCH_SPANS = 256
PERIOD_S = 0.5
UNREAD_BYTES = 1 << 20
"""More than this waits for the runner already: it gets answers first."""


class SpanReturn(Tracer):
    """A tracer whose spans wait in a queue until `flush` hands them to the runner's socket."""

    def __init__(self, share: float) -> None:
        super().__init__("", share)
        self._queue: deque[list[Any]] = deque()
        self._lock = threading.Lock()
        """Environment code may have threads."""
        self._lost = 0
        self._writer: asyncio.StreamWriter | None = None

    def write(self, span: Span) -> None:
        row = row_of(span)
        with self._lock:
            if len(self._queue) < QUEUE_SPANS:
                self._queue.append(row)
            else:
                self._lost += 1

    def sends_to(self, writer: asyncio.StreamWriter) -> None:
        """`writer`: of the runner's socket."""
        self._writer = writer

    def flush(self, unread_bytes: int = UNREAD_BYTES) -> None:
        """Hand on what waits, unless the runner is behind by so much with reading."""
        writer = self._writer
        while writer is not None and (self._queue or self._lost):
            if writer.transport.get_write_buffer_size() > unread_bytes:
                return
            with self._lock:
                rows = [self._queue.popleft() for _ in range(min(BATCH_SPANS, len(self._queue)))]
                lost, self._lost = self._lost, 0
            writer.write(json.dumps({"id": 0, "spans": rows, "lost": lost}).encode() + b"\n")

    async def run(self) -> NoReturn:
        """Hand on what ends while no answer is given."""
        while True:
            await asyncio.sleep(PERIOD_S)
            self.flush()


def install(config: TracingConfig) -> SpanReturn | None:
    """Have spans of this process go to the runner, those of OpenTelemetry's API, too; None where nothing is traced."""
    if not config.sample_share:
        return None
    spans = SpanReturn(config.sample_share)
    use(spans)
    otel_bridge.install(spans)
    return spans
