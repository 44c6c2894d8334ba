"""What the runner does with spans that an environment's process sends: they join its own, in a file beside it."""

from __future__ import annotations

from typing import Any

import structlog

from slipstream.common import tracing
from slipstream.common.timeline import TimelineFile
from slipstream.runner import telemetry
from slipstream.runner.span_return import BATCH_SPANS
from slipstream.runner.span_text import span_of

log = structlog.get_logger()

SERVICE = "environment"


class SpanIntake:
    """Takes the spans of one environment's processes."""

    def __init__(self, environment: str) -> None:
        self._environment = environment
        self._file: TimelineFile | None = None

    def take(self, message: dict[str, Any]) -> None:
        """Write a line of spans where spans go. Raises `ValueError` for what is no such line."""
        rows, lost = message["spans"], message.get("lost")
        if not isinstance(rows, list) or not isinstance(lost, int) or lost < 0:
            raise ValueError("no line of spans")
        if lost:
            self.lost("queue", lost)
        if not tracing.enabled():
            return
        taken: list[tracing.Span] = []
        process = SERVICE, self._open()
        for row in rows[:BATCH_SPANS]:  # pyright: ignore[reportUnknownVariableType]
            try:
                taken.append(span_of(row, process))
            except ValueError:
                self.lost("malformed", 1)
        if len(rows) > BATCH_SPANS:  # pyright: ignore[reportUnknownArgumentType]
            self.lost("malformed", len(rows) - BATCH_SPANS)  # pyright: ignore[reportUnknownArgumentType]
        if taken:
            tracing.bring(taken, self._file)
            telemetry.environment_spans.labels(self._environment).inc(len(taken))

    def lost(self, why: str, count: int = 1) -> None:
        """Count spans that never came."""
        telemetry.environment_spans_lost.labels(self._environment, why).inc(count)

    def _open(self) -> str:
        """The replica that these processes are in a trace."""
        if self._file is None:
            self._file = tracing.file_beside(self._environment)
        return self._file.path.stem if self._file is not None else self._environment
