"""Rules stated in the protos (`protovalidate`), checked where a message comes in."""

from __future__ import annotations

import protovalidate
from google.protobuf.message import Message

from slipstream.common.errors import InvalidRequest

_validator = protovalidate.Validator()


def validate(message: Message) -> None:
    """Raise `InvalidRequest` naming the first field that breaks its rule."""
    violations = _validator.collect_violations(message, fail_fast=True)
    if violations:
        _refuse(violations[0])


def _refuse(violation: protovalidate.Violation) -> None:
    proto = violation.proto
    # A range is one rule with two bounds, of which the violation carries only the first.
    bounds = proto.message if "_" in proto.rule_id else violation.rule_value
    field = _path(proto.field)
    raise InvalidRequest(
        f"{field}: {proto.message}",
        field=field,
        rule=proto.rule_id,
        limit="" if bounds is None else bounds,
    )


def _path(path: protovalidate.FieldPathPb | None) -> str:
    """`a.b[2].c` for a field path; "message" for a rule over the whole message."""
    if path is None:
        return "message"
    text = ""
    for element in path.elements:
        text += f".{element.field_name}" if text else element.field_name
        subscript = element.subscript
        if subscript is not None:
            text += f"[{subscript.value!r}]"
    return text
