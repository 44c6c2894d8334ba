"""Requests made from descriptors and protovalidate rules: a valid one, and everything near it that is not."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any, cast

from buf.validate import validate_pb2
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

F = FieldDescriptor
Field = Any
"""A FieldDescriptor, of whichever implementation."""
INT_RANGES = {
    F.TYPE_INT32: (-(2**31), 2**31 - 1),
    F.TYPE_INT64: (-(2**63), 2**63 - 1),
    F.TYPE_UINT32: (0, 2**32 - 1),
    F.TYPE_UINT64: (0, 2**64 - 1),
    F.TYPE_FIXED32: (0, 2**32 - 1),
    F.TYPE_FIXED64: (0, 2**64 - 1),
    F.TYPE_SINT32: (-(2**31), 2**31 - 1),
    F.TYPE_SINT64: (-(2**63), 2**63 - 1),
    F.TYPE_SFIXED32: (-(2**31), 2**31 - 1),
    F.TYPE_SFIXED64: (-(2**63), 2**63 - 1),
}
FLOATS = (F.TYPE_FLOAT, F.TYPE_DOUBLE)
STRANGE_STRINGS = ("\x00", "../../etc/passwd", "‮abc", "a\nb\r\n", "{}'\";--", "𝔘" * 40, " ", "%s%n", "-1")
MOST_ENTRIES = 1_000_000
LARGEST_BYTES = 12 * 1024 * 1024
"""What a repeated field is filled up to: below the limit of a message."""


def rules_of(field: Field) -> Any:
    """The rules of one field, empty where it has none."""
    return field.GetOptions().Extensions[cast(Any, validate_pb2.field)]


def typed(rules: Any) -> Any:
    """The part of the rules that is about the field's own type."""
    kind = rules.WhichOneof("type")
    return getattr(rules, kind) if kind else rules


def is_map(field: Field) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


# --- valid ones ---------------------------------------------------------------------------------------


def fill(message: Message, rng: random.Random) -> Message:
    """Give every field a value that keeps its rules; of a oneof, one member."""
    chosen = {oneof.name: rng.choice(list(oneof.fields)).name for oneof in message.DESCRIPTOR.oneofs}
    for field in message.DESCRIPTOR.fields:
        if field.containing_oneof is not None and chosen[field.containing_oneof.name] != field.name:
            continue
        rules = rules_of(field)
        if is_map(field):
            continue
        if field.is_repeated:
            for _ in range(max(1, typed(rules).min_items if rules.HasField("repeated") else 1)):
                add(message, field, rng)
        elif field.message_type is not None:
            fill(getattr(message, field.name), rng)
            getattr(message, field.name).SetInParent()
        else:
            setattr(message, field.name, valid_scalar(field, rules, rng))
    return message


def add(message: Message, field: Field, rng: random.Random) -> None:
    values = getattr(message, field.name)
    if field.message_type is not None:
        fill(values.add(), rng)
    else:
        values.append(valid_scalar(field, rules_of(field).repeated.items, rng))


def valid_scalar(field: Field, rules: Any, rng: random.Random) -> Any:
    rule = typed(rules)
    if field.type in INT_RANGES:
        low = rule.gte if _has(rule, "gte") else rule.gt + 1 if _has(rule, "gt") else 0
        return low
    if field.type in FLOATS:
        return float(rule.gte if _has(rule, "gte") else 0.0)
    if field.type == F.TYPE_STRING:
        if _has_list(rule, "in"):
            return rng.choice(list(getattr(rule, "in")))
        if "sha256" in getattr(rule, "pattern", ""):
            return "sha256:" + "0" * 64
        return "edges"
    if field.type == F.TYPE_BYTES:
        return b"edges"
    if field.type == F.TYPE_ENUM:
        return field.enum_type.values[-1].number
    return bool(rng.getrandbits(1))


# --- what is near -------------------------------------------------------------------------------------


def mutants(message: Message, rng: random.Random, path: str = "") -> Iterator[tuple[str, Message]]:
    """Copies of `message` in which one thing is at or beyond a limit, missing, or too many. Named by kind and field."""
    for field in message.DESCRIPTOR.fields:
        name = f"{path}{field.name}"
        rules = rules_of(field)
        if is_map(field):
            yield from _map_mutants(message, field, rules, name)
        elif field.is_repeated:
            yield from _repeated_mutants(message, field, rules, rng, name)
        elif field.message_type is not None:
            yield f"unset {name}", _without(message, field)
            held = message if message.HasField(field.name) else _with_filled(message, field, rng)
            for kind, sub in mutants(getattr(held, field.name), rng, f"{name}."):
                copy = _copy(held)
                getattr(copy, field.name).CopyFrom(sub)
                yield kind, copy
        else:
            for value in edge_values(field, rules):
                copy = _copy(message)
                setattr(copy, field.name, value)
                yield f"{name} = {_shown(value)}", copy


def edge_values(field: Field, rules: Any) -> list[Any]:
    """Values of a scalar at its limits and just beyond, and what tends to surprise."""
    rule = typed(rules)
    bounds = [getattr(rule, name) for name in ("gte", "lte", "gt", "lt") if _has(rule, name)]
    if field.type in INT_RANGES:
        low, high = INT_RANGES[field.type]
        near = [bound + step for bound in bounds for step in (-1, 0, 1)]
        return [value for value in dict.fromkeys([0, -1, low, high, high - 1, *near]) if low <= value <= high]
    if field.type in FLOATS:
        near = [bound + step for bound in bounds for step in (-1e-3, 0.0, 1e-3)]
        return [0.0, -0.0, 1e-45, -1.0, 3e38, math.nan, math.inf, -math.inf, *near]
    if field.type == F.TYPE_STRING:
        return ["", *_lengths("a", rule), *STRANGE_STRINGS]
    if field.type == F.TYPE_BYTES:
        return [b"", *(value.encode() for value in _lengths("a", rule)), b"\x00\xff" * 64]
    if field.type == F.TYPE_ENUM:
        return [*(value.number for value in field.enum_type.values), -1, 99, 2**31 - 1]
    return [False, True]


def _lengths(letter: str, rule: Any) -> list[str]:
    sizes = [getattr(rule, name) for name in ("min_len", "max_len", "max_bytes") if _has(rule, name)]
    texts = [letter * (size + step) for size in sizes for step in (-1, 0, 1) if size + step > 0]
    if _has(rule, "max_len"):
        texts.append("ä" * rule.max_len)
    return texts or [letter * 5000]


def _repeated_mutants(
    message: Message, field: Field, rules: Any, rng: random.Random, name: str
) -> Iterator[tuple[str, Message]]:
    yield f"no {name}", _without(message, field)
    held = _copy(message)
    if not len(getattr(held, field.name)):
        add(held, field, rng)
    first = getattr(held, field.name)[0]
    twice = _copy(held)
    getattr(twice, field.name).extend([first])
    yield f"{name} twice the same", twice
    count = typed(rules).max_items if rules.HasField("repeated") else 0
    size = first.ByteSize() + 4 if field.message_type is not None else len(str(first)) + 2
    for many in (count + 1 if count else 0, MOST_ENTRIES if not path_of(name) else 0):
        if many and many * size <= LARGEST_BYTES:
            crowd = _copy(held)
            getattr(crowd, field.name).extend([first] * many)
            yield f"{many} {name}", crowd
    if field.message_type is not None:
        for kind, sub in mutants(first, rng, f"{name}[0]."):
            copy = _copy(held)
            getattr(copy, field.name)[0].CopyFrom(sub)
            yield kind, copy
    else:
        for value in edge_values(field, rules.repeated.items):
            copy = _copy(held)
            getattr(copy, field.name)[0] = value
            yield f"{name}[0] = {_shown(value)}", copy


def path_of(name: str) -> str:
    """What a field is in, empty at the top."""
    return name.rpartition(".")[0]


def _map_mutants(message: Message, field: Field, rules: Any, name: str) -> Iterator[tuple[str, Message]]:
    key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
    some = valid_scalar(value, rules.map.values, random.Random(0))
    for text in edge_values(key, rules.map.keys):
        copy = _copy(message)
        getattr(copy, field.name)[text] = some
        yield f"{name} has the key {_shown(text)}", copy
    for content in edge_values(value, rules.map.values):
        copy = _copy(message)
        getattr(copy, field.name)["edges"] = content
        yield f"{name} has the value {_shown(content)}", copy
    crowd = _copy(message)
    for number in range(rules.map.max_pairs + 1 if rules.map.max_pairs else 5000):
        getattr(crowd, field.name)[f"k{number}"] = some
    yield f"{name} has too many pairs", crowd
    wide = _copy(message)
    getattr(wide, field.name)["k" * 1_000_000] = some
    yield f"{name} has a key of a megabyte", wide


def _has(rule: Any, name: str) -> bool:
    return name in rule.DESCRIPTOR.fields_by_name and rule.HasField(name)


def _has_list(rule: Any, name: str) -> bool:
    return name in rule.DESCRIPTOR.fields_by_name and len(getattr(rule, name)) > 0


def _copy(message: Message) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def _without(message: Message, field: Field) -> Message:
    copy = _copy(message)
    copy.ClearField(field.name)
    return copy


def _with_filled(message: Message, field: Field, rng: random.Random) -> Message:
    copy = _copy(message)
    fill(getattr(copy, field.name), rng)
    getattr(copy, field.name).SetInParent()
    return copy


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 24 else f"{text[:12]}... of {len(value)}"
