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
    field = _path(proto.field) or "message"
    raise InvalidRequest(
        f"{field}: {proto.message}",
        field=field,
        rule=proto.rule_id,
        limit="" if violation.rule_value is None else violation.rule_value,
    )


def _path(path: protovalidate.FieldPathPb) -> str:
    """`a.b[2].c` for a field path."""
    text = ""
    for element in path.elements:
        text += f".{element.field_name}" if text else element.field_name
        subscript = element.subscript
        if subscript is not None:
            text += f"[{subscript.value!r}]"
    return text
