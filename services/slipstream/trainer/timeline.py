"""The trainer's part of the run's timeline, whose training steps and publishing are spans of a trace as well."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slipstream.common import tracing
from slipstream.common.timeline import TimelineFile
from slipstream.common.tracing import Span, TraceContext


class Timeline:
    """Appends intervals of work in Unix seconds. Kinds: "sft", "train_step", "publish"."""

    def __init__(self, path: Path, limit_bytes: int = 0) -> None:
        """`limit_bytes`: on disk, of this file and the older one that it becomes; 0 means no bound."""
        self._file = TimelineFile(path, limit_bytes)

    @contextmanager
    def interval(
        self,
        kind: str,
        of: TraceContext | None = None,
        *,
        root: bool = False,
        links: Sequence[TraceContext] = (),
        **fields: object,
    ) -> Iterator[None]:
        """Record how long the block took. A block that raises leaves no record.

        `of`: the trace that it is a span of, its first if `root`; calls made in the block belong to it.
        """
        context = of if of is None or root else tracing.child(of)
        start_s, began_s = time.time(), time.monotonic()
        with tracing.entered(context):
            yield
        end_s = start_s + time.monotonic() - began_s  # a clock that is set meanwhile does not change how long it took
        if of is not None and context is not None:
            span = Span(kind, context, "" if root else of.span_id, start_s, end_s, links, fields)
            tracing.export(span)
            fields = span.fields()
        self._file.record(kind, start_s, end_s, **fields)
