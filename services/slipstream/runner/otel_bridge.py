"""OpenTelemetry's API in an environment's process: spans that environment code opens with it join the rollout's trace.

    from opentelemetry import trace

    with trace.get_tracer("mine").start_as_current_span("compile", attributes={"files": 3}):
        ...                                      # below `environment_step`; calls of the sandbox are below this one

The API alone is needed. Its context carries the trace in this process, so that spans of either kind are below one
another as the code says. Outside a rollout that is traced nothing is recorded. Events and statuses are not kept, but
for the exception that ended a span. An environment that sets a provider of its own keeps it: its spans go where that
sends them, with the rollout's trace as theirs. What is no attribute, link or time is left out and fails nothing: code
does as well where it is traced as where it is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import structlog

from slipstream.common import tracing
from slipstream.common.tracing import Span, TraceContext, Tracer

log = structlog.get_logger()


def install(spans: Tracer) -> None:
    """Carry traces in OpenTelemetry's context, if its API is there; `provide` takes its spans."""
    try:
        bridge = _Bridge(spans)
    except ModuleNotFoundError:
        return
    tracing.carry_in(bridge)


def provide() -> None:
    """Take what OpenTelemetry's API opens, unless environment code has named somebody else by now."""
    carrier = tracing.carrier()
    if isinstance(carrier, _Bridge):
        carrier.provide()


class _Bridge:
    """OpenTelemetry's context in place of the `ContextVar` of `tracing.py`, and a provider of spans."""

    def __init__(self, spans: Tracer) -> None:
        from opentelemetry import context, trace

        self._api, self._context = trace, context
        self._key = context.create_key("slipstream-trace")
        self._spans = spans
        self._flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)

    def get(self) -> TraceContext | None:
        return self.of(None)

    def of(self, context: Any) -> TraceContext | None:
        """The place in a rollout's trace that a context says; None outside of any."""
        known = self._context.get_value(self._key, context)
        span = self._api.get_current_span(context).get_span_context()
        trace_id = f"{span.trace_id:032x}"
        return TraceContext(trace_id, f"{span.span_id:016x}") if trace_id == known else None

    def set(self, context: TraceContext) -> Any:
        span = self._api.NonRecordingSpan(self.named(context))
        inside = self._context.set_value(self._key, context.trace_id)
        return self._context.attach(self._api.set_span_in_context(span, inside))

    def reset(self, token: Any) -> None:
        self._context.detach(token)

    def named(self, context: TraceContext) -> Any:
        """A place as OpenTelemetry has it."""
        return self._api.SpanContext(int(context.trace_id, 16), int(context.span_id, 16), False, self._flags)

    def provide(self) -> None:
        if not isinstance(self._api.get_tracer_provider(), self._api.ProxyTracerProvider):
            log.info("tracer_provider_kept", detail="environment code has set one; its spans go there")
            return
        self._api.set_tracer_provider(_classes(self, self._spans))


def _classes(bridge: _Bridge, spans: Tracer) -> Any:
    """The provider. In a function, as the classes are of a package that need not be there."""
    from opentelemetry import trace
    from opentelemetry.util._decorator import _agnosticcontextmanager  # the API's own tracers are decorated with it

    class Provider(trace.TracerProvider):
        def get_tracer(self, *_: Any, **__: Any) -> trace.Tracer:
            return Tracing()

    class Tracing(trace.Tracer):
        def start_span(
            self,
            name: str,
            context: Any = None,
            kind: Any = None,
            attributes: Any = None,
            links: Sequence[Any] | None = None,
            start_time: int | None = None,
            record_exception: bool = True,
            set_status_on_exception: bool = True,
        ) -> trace.Span:
            parent = bridge.of(context)
            if parent is None:
                return trace.INVALID_SPAN
            span = Recorded(name, parent, start_time)
            span.set_attributes(attributes)
            for link in links or ():
                span.add_link(getattr(link, "context", None))
            return span

        @_agnosticcontextmanager
        def start_as_current_span(
            self, name: str, *args: Any, end_on_exit: bool = True, **kwargs: Any
        ) -> Iterator[trace.Span]:
            span = self.start_span(name, *args, **kwargs)
            if span is trace.INVALID_SPAN:  # as current it would hide the trace from what is inside
                yield span
                return
            with trace.use_span(span, end_on_exit=end_on_exit) as current:
                yield current

    class Recorded(trace.Span):
        def __init__(self, name: str, parent: TraceContext, start_ns: Any) -> None:
            self._name = name
            self._attributes: dict[str, Any] = {}
            self._links: list[TraceContext] = []
            self._parent, self._own = parent, tracing.child(parent)
            self._start_ns = moment_ns(start_ns)
            self._ended = False

        def end(self, end_time: Any = None) -> None:
            if self._ended:
                return
            self._ended = True
            end_ns = max(moment_ns(end_time), self._start_ns)
            spans.write(Span(self._name, self._own, self._parent.span_id, self._start_ns / 1e9, end_ns / 1e9,
                             self._links, self._attributes))  # fmt: skip

        def get_span_context(self) -> trace.SpanContext:
            return bridge.named(self._own)

        def set_attributes(self, attributes: Any) -> None:
            if not self._ended and isinstance(attributes, Mapping):
                self._attributes.update(attributes)

        def set_attribute(self, key: str, value: Any) -> None:
            self.set_attributes({key: value})

        def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
            """Not kept."""

        def add_link(self, context: Any, attributes: Any = None) -> None:
            if isinstance(context, trace.SpanContext):
                self._links.append(TraceContext(f"{context.trace_id:032x}", f"{context.span_id:016x}"))

        def update_name(self, name: str) -> None:
            self._name = name

        def is_recording(self) -> bool:
            return not self._ended

        def set_status(self, status: Any, description: str | None = None) -> None:
            """Not kept."""

        def record_exception(self, exception: BaseException, *_: Any, **__: Any) -> None:
            self.set_attribute("error", type(exception).__name__)

    def moment_ns(given: Any) -> int:
        """What environment code gives as a time; now, where that is none."""
        return given if isinstance(given, int) and 0 < given < 2**63 else round(tracing.now_s() * 1e9)

    return Provider()
