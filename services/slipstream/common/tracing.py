"""Traces: what became of one rollout, from its dispatch to the step that trained it, across all services.

    with tracing.span("turn", of=tracing.rollout_trace("train-7", 1, 1, 3), samples=1):
        ...                                   # calls made in here carry the trace to whoever answers them

Each rollout of an attempt at a group has a trace of its own; what they share, a request for all of them say, is in one
of the group, and its copies in theirs. The ids of a trace, its root and whether it is recorded follow from its name and
the run's: every service knows them without being told, also after a restart. Inside a call the context travels as W3C's
`traceparent`. Spans that have ended go into the process's file under `<run_dir>/timeline/` and, where
`tracing.otlp_endpoint` is set, to a collector (`otlp.py`). Nothing here waits or raises for the sake of a trace.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import structlog

from slipstream.common.config import ServiceConfig
from slipstream.common.timeline import TimelineFile

if TYPE_CHECKING:
    from slipstream.api.training.v1 import batch_pb2
    from slipstream.common.otlp import OtlpExport

HEADER = "traceparent"
SPAN = "span"
"""The `kind` of a line that is a span and no interval of work."""
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-01")
_NUMBERS = re.compile(r"\.([0-9]{1,9})\.([0-9]{1,9})\Z")
"""At the end of a rollout's id: its attempt, and its index in the group."""
_SHARES = 1 << 32
BATCH_SPANS = 64
PERIOD_S = 0.2
"""How long a span that has ended waits for others: what a process that is killed may lose."""
_ids = random.Random(os.urandom(32))
os.register_at_fork(after_in_child=lambda: _ids.seed(os.urandom(32)))


class TraceContext(NamedTuple):
    """Where a span belongs: hexadecimal ids of a trace and of a span in it, as W3C has them."""

    trace_id: str
    span_id: str


class RolloutName(NamedTuple):
    """Of a rollout, as `rollout_trace` takes it."""

    group_id: str
    incarnation: int
    attempt: int
    sample_index: int


@dataclass(frozen=True)
class Span:
    """One that has ended."""

    name: str
    context: TraceContext
    parent_id: str
    """Empty: the first of its trace."""
    start_s: float
    end_s: float
    """Unix seconds."""
    links: Sequence[TraceContext] = ()
    """Traces that it belongs to as well."""
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    process: tuple[str, str] | None = None
    """Service and replica of another process that it was brought from."""

    def fields(self) -> dict[str, Any]:
        """What a line of the timeline says of it, beside when."""
        links = {"links": [list(link) for link in self.links]} if self.links else {}
        parent = {"parent": self.parent_id} if self.parent_id else {}
        trace = {"name": self.name, "trace": self.context.trace_id, "span": self.context.span_id}
        return {**trace, **parent, **links, **self.attributes}


class Tracer:
    """What is recorded, and where it goes. One a process."""

    def __init__(
        self,
        run_id: str,
        share: float,
        file: TimelineFile | None = None,
        otlp: OtlpExport | None = None,
        batch_spans: int = BATCH_SPANS,
    ) -> None:
        """`batch_spans`: so many go to the file together, at most."""
        self.batch_spans = batch_spans
        self.run_id = run_id
        self.share = share
        self.file = file
        self.otlp = otlp
        self._waiting: deque[Span] = deque()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        """Flushes in a moment."""

    def write(self, span: Span) -> None:
        """Put a span where spans go. Where an event loop runs, those of a moment are written at once: each call of the
        system lets the other threads in, which costs several times what the span itself does."""
        self._waiting.append(span)
        if len(self._waiting) >= self.batch_spans or not self._flushes_later():
            self.flush()
        self.export(span)

    def flush(self) -> None:
        """Write what waits for the file."""
        with self._lock:
            spans = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if self.file is None or not spans:
                return
            try:
                self.file.record_all(SPAN, [(span.start_s, span.end_s, span.fields()) for span in spans])
            except OSError as error:  # of a full disk it waits for room; here there is none to write to
                log.warning("spans_not_written", detail=str(error))
                self.file = None

    def _flushes_later(self) -> bool:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return False
        if self._loop is not loop:
            self._loop = loop
            loop.call_later(PERIOD_S, self._flush_now)
        return True

    def _flush_now(self) -> None:
        self._loop = None
        self.flush()

    def export(self, span: Span) -> None:
        """Hand a span that is in the file already to the collector."""
        if self.otlp is not None:
            self.otlp.put(span)

    def close(self) -> None:
        self.flush()
        if self.otlp is not None:
            self.otlp.close()


log = structlog.get_logger()


class Opened(Protocol):
    """A block that is recorded, or would be."""

    @property
    def copies(self) -> Mapping[str, TraceContext]:
        """Where spans inside it go that are of one rollout alone, by the rollouts' ids."""
        ...


class Carrier(Protocol):
    """What holds the present place in a trace, apart for each task and thread. A `ContextVar` is one."""

    def get(self) -> TraceContext | None: ...

    def set(self, value: TraceContext, /) -> Any: ...

    def reset(self, token: Any, /) -> None: ...


_tracer = Tracer("", 0.0)
_current: Carrier = ContextVar[TraceContext | None]("trace", default=None)


def setup(config: ServiceConfig, service: str) -> None:
    """Have this process record spans as its configuration says. Raises `ConfigError`."""
    settings = config.tracing
    replica = config.replica or service
    otlp = None
    if settings.sample_share and settings.otlp_endpoint:
        from slipstream.common.otlp import OtlpExport  # what it imports is an extra

        otlp = OtlpExport(settings.otlp_endpoint, {"service.name": service, "service.instance.id": replica,
                                                   "slipstream.run_id": config.run_id})  # fmt: skip
    file = TimelineFile(config.run_dir / "timeline" / f"{replica}.jsonl", settings.limit_bytes)
    use(Tracer(config.run_id, settings.sample_share, file, otlp))


def use(tracer: Tracer) -> None:
    """Record with this one from now on."""
    global _tracer
    _tracer.flush()
    _tracer = tracer


def write_to(file: TimelineFile) -> None:
    """Spans join the intervals that this process writes already: one file a process."""
    if _tracer.share:
        _tracer.file = file


def carry_in(carrier: Carrier) -> None:
    """Keep the place in a trace there from now on: for a process whose code may have means of its own to move it."""
    global _current
    _current = carrier


def carrier() -> Carrier:
    """Where the place in a trace is kept."""
    return _current


def file_beside(name: str) -> TimelineFile | None:
    """A file for the spans of another process, beside this one's; None where this one has none."""
    return _tracer.file.beside(name) if _tracer.file is not None else None


def bring(spans: Sequence[Span], file: TimelineFile | None) -> None:
    """Write spans of another process to its file, and hand them to the collector."""
    if file is not None:
        try:
            file.record_all(SPAN, [(span.start_s, span.end_s, span.fields()) for span in spans])
        except OSError as error:
            log.warning("spans_not_written", detail=str(error))
    for span in spans:
        _tracer.export(span)


def close() -> None:
    """Send what waits for a collector, for a moment at most."""
    _tracer.close()


def enabled() -> bool:
    return _tracer.share > 0


def now_s() -> float:
    """Unix seconds, for where a span begins; how long it takes is of a steady clock."""
    return time.time()


def group_trace(group_id: str, incarnation: int, attempt: int) -> TraceContext | None:
    """The root of the trace of an attempt at a group; None where it is not among the recorded share.

    `incarnation`: that it was dispatched at. An attempt that a restored trainer has run again is another."""
    if not _tracer.share:
        return None
    context = _context_of(f"group {group_id}.{incarnation}.{attempt}")
    return context if int(context.trace_id[:8], 16) < _tracer.share * _SHARES else None


def rollout_trace(group_id: str, incarnation: int, attempt: int, index: int) -> TraceContext | None:
    """The root of the trace of a rollout, which is recorded where its group is."""
    if group_trace(group_id, incarnation, attempt) is None:
        return None
    return _context_of(f"rollout {group_id}.{incarnation}.{attempt}.{index}")


def trace_id(of: TraceContext | None) -> str:
    """What people look it up by; empty where it is not recorded."""
    return "" if of is None else of.trace_id


def rollout_id(group_id: str, attempt: int, index: int) -> str:
    """What a rollout is called by whoever reports, plans or traces it."""
    return f"{group_id}.{attempt}.{index}"


def planned_rollouts(plans: Iterable[batch_pb2.Plan]) -> list[RolloutName]:
    """The rollouts that plans train, where anything is traced. Those whose ids are of another form are left out."""
    if not _tracer.share:
        return []
    found: dict[str, RolloutName] = {}
    for planned in (each for plan in plans for batch in plan.micro_batches for each in batch.sequences):
        if planned.rollout_id in found or (numbers := _NUMBERS.search(planned.rollout_id)) is None:
            continue
        attempt, index = map(int, numbers.groups())
        found[planned.rollout_id] = RolloutName(planned.group_id, planned.dispatch_version.incarnation, attempt, index)
    return list(found.values())


def step_trace(version: str) -> TraceContext | None:
    """The root of the trace of the training step that makes a version; all of them are recorded, if any trace is."""
    return _context_of(f"step {version}") if _tracer.share else None


def _context_of(name: str) -> TraceContext:
    digest = hashlib.blake2b(f"{_tracer.run_id} {name}".encode(), digest_size=24).hexdigest()
    return TraceContext(digest[:32], digest[32:])


def record(
    name: str,
    of: TraceContext | None,
    duration_s: float,
    *,
    links: Sequence[TraceContext | None] = (),
    **attributes: Any,
) -> None:
    """Write a span that ends now, below `of`; nothing where that is None."""
    if of is not None:
        end_s = now_s()
        record_between(name, of, end_s - max(duration_s, 0.0), end_s, links=links, **attributes)


def record_between(
    name: str,
    of: TraceContext | None,
    start_s: float,
    end_s: float,
    *,
    root: bool = False,
    links: Sequence[TraceContext | None] = (),
    **attributes: Any,
) -> None:
    """Write a span of these Unix seconds, below `of` or, as the `root`, in its place; nothing where that is None."""
    if of is not None:
        context = of if root else TraceContext(of.trace_id, _new_id())
        known = [link for link in links if link is not None]
        _tracer.write(Span(name, context, "" if root else of.span_id, start_s, end_s, known, attributes))


def export(span: Span) -> None:
    """Hand on a span that its writer has put into the file itself."""
    _tracer.export(span)


def current() -> TraceContext | None:
    """The block that is open around this code."""
    return _current.get()


def traceparent() -> str | None:
    """What a call made now carries."""
    context = _current.get()
    return None if context is None else f"00-{context.trace_id}-{context.span_id}-01"


def parse(header: str | bytes) -> TraceContext | None:
    """The context in a header; None for what is none, or of a trace that is not recorded."""
    found = _TRACEPARENT.fullmatch(header) if isinstance(header, str) else None
    return TraceContext(*found.groups()) if found and _tracer.share else None


class _Nothing:
    """A span that is not recorded."""

    copies: Mapping[str, TraceContext] = MappingProxyType({})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _Open:
    """A span from where the block begins to where it ends, however that is."""

    def __init__(
        self, name: str, parent: TraceContext, copies: Mapping[str, TraceContext], attributes: dict[str, Any]
    ) -> None:
        self._name = name
        self._parent = parent
        self._attributes = attributes
        self._context = TraceContext(parent.trace_id, _new_id())
        self._parents = copies
        self.copies = {rollout_id: child(each) for rollout_id, each in copies.items()}
        self._token: Any

    def __enter__(self) -> Self:
        self._token = _current.set(self._context)
        self._start_s, self._began_s = now_s(), time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _current.reset(self._token)
        if kind is not None:
            self._attributes["error"] = kind.__name__
        start_s, end_s = self._start_s, self._start_s + time.monotonic() - self._began_s
        context, parent_id = self._context, self._parent.span_id
        _tracer.write(Span(self._name, context, parent_id, start_s, end_s, (), self._attributes))
        for rollout_id, copy in self.copies.items():
            attributes = {"rollout": rollout_id, **self._attributes}
            parent_id = self._parents[rollout_id].span_id
            _tracer.write(Span(self._name, copy, parent_id, start_s, end_s, (context,), attributes))


class _Entered:
    """A block whose calls carry a context that its writer records by itself."""

    def __init__(self, context: TraceContext) -> None:
        self._context = context
        self._token: Any

    def __enter__(self) -> None:
        self._token = _current.set(self._context)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


_NOTHING = _Nothing()


def span(
    name: str,
    of: TraceContext | None = None,
    copies: Mapping[str, TraceContext] = _NOTHING.copies,
    **attributes: Any,
) -> _Open | _Nothing:
    """A block that is recorded below the block around it or, where that is of another trace than `of`, or none is,
    below `of`. `copies`: rollouts that it is work for as well, by their ids, and what it is below in their traces."""
    current = _current.get()
    parent = current if of is None or (current is not None and current.trace_id == of.trace_id) else of
    return _NOTHING if parent is None else _Open(name, parent, copies, attributes)


def entered(context: TraceContext | None) -> _Entered | _Nothing:
    """A block whose calls belong to `context`."""
    return _NOTHING if context is None else _Entered(context)


def child(parent: TraceContext) -> TraceContext:
    """A new place below another."""
    return TraceContext(parent.trace_id, _new_id())


def _new_id() -> str:
    return f"{_ids.getrandbits(64):016x}"
