"""A span of an environment's process as a row of JSON. Its name and attributes are environment code's: bounded both
where they are written and where they are read, as nobody vouches for that process."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from slipstream.common.tracing import Span, TraceContext

MAX_NAME_CHARACTERS = 128
MAX_VALUE_CHARACTERS = 512
MAX_ATTRIBUTES = 16
MAX_LINKS = 8
MAX_DEPTH = 2
"""Of lists within one another, in a value."""
MAX_TIME_S = 2**63 / 1e9
"""Collectors are told nanoseconds."""
_TRACE_ID = re.compile("[0-9a-f]{32}")
_SPAN_ID = re.compile("[0-9a-f]{16}")
_RESERVED = frozenset({"kind", "start_s", "end_s", "name", "trace", "span", "parent", "links", "rollout"})
"""Of a line of the timeline."""


def row_of(span: Span) -> list[Any]:
    """The row of a span, whatever its name and attributes are: a span never fails the code that it tells of."""
    links = [list(link) for link in span.links[:MAX_LINKS]]
    return [_named(span.name) or "span", *span.context, span.parent_id, span.start_s, span.end_s,
            tame(span.attributes), links]  # fmt: skip


def span_of(row: Any, process: tuple[str, str]) -> Span:
    """The span of a row, as of `process`, its service and its replica. Raises `ValueError` for what is none."""
    try:
        name, trace_id, span_id, parent_id, start_s, end_s, attributes, links = row
        context, parent = _context(trace_id, span_id), _context(trace_id, parent_id)
        start_s, end_s = float(start_s), float(end_s)
        if not 0 <= start_s <= end_s < MAX_TIME_S:  # nor what is no number
            raise ValueError("a span ends no earlier than it begins, and before the year 2262")
        known = [_context(*link) for link in links[:MAX_LINKS]]
        tamed = tame(attributes)
    except (TypeError, AttributeError, KeyError, OverflowError) as error:
        raise ValueError(f"no row of a span: {error}") from None
    return Span(_named(name) or "span", context, parent.span_id, start_s, end_s, known, tamed, process)


def _context(trace_id: Any, span_id: Any) -> TraceContext:
    if not (_TRACE_ID.fullmatch(trace_id) and _SPAN_ID.fullmatch(span_id)):
        raise ValueError("no ids of a span")
    return TraceContext(trace_id, span_id)


def tame(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The first attributes, as plain values that any reader of JSON or OTLP takes."""
    tamed: dict[str, Any] = {}
    for name, value in list(attributes.items()):  # other threads of an environment may add to them meanwhile
        if len(tamed) == MAX_ATTRIBUTES:
            break
        shown = _named(name)
        tamed[f"{shown}_" if shown in _RESERVED else shown] = _told(value)
    return tamed


def _named(name: Any) -> str:
    """A name as text; people give numbers, too, or nothing."""
    return text(str(_told(name)), MAX_NAME_CHARACTERS)


def _told(value: Any) -> bool | int | float | str:
    """A plain value in place of any."""
    try:
        return _plain(value)
    except Exception:  # of a subclass of list, str or int, whose operators are environment code
        return type(value).__name__


def _plain(value: Any, depth: int = MAX_DEPTH) -> bool | int | float | str:
    if value is None or isinstance(value, bool):
        return "None" if value is None else value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else text(hex(value), MAX_VALUE_CHARACTERS)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, str):
        return text(value, MAX_VALUE_CHARACTERS)
    if isinstance(value, list | tuple) and depth:
        shown = (str(_plain(each, depth - 1)) for each in value[:MAX_ATTRIBUTES])  # pyright: ignore
        return text(", ".join(shown), MAX_VALUE_CHARACTERS)
    return type(value).__name__  # what its str() does is environment code's


def text(value: str, characters: int) -> str:
    """So much of it, as UTF-8 can say it."""
    return str(value[:characters]).encode("utf-8", "replace").decode()
