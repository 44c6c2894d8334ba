"""From a body's bytes to a JSON object, and what is wrong with those that are none, each by its own name.

| code | |
|---|---|
| `invalid_json` | no JSON, and where it stops to be; or another value than an object; or empty |
| `invalid_utf8` | bytes that are no text, or text with half of a character in it |
| `nested_too_deep` | lists and objects within one another, more than templates and encoders go down |
| `number_out_of_range` | NaN, Infinity, what no float holds, an integer of more digits than anything needs |
| `too_many_elements` | more values, or keys, than any conversation has: what reads them would hold up all others |
| `duplicate_key` | a key twice in one object: who reads it would choose which one counts |
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, NoReturn

from slipstream.gateway.refusals import Refusal

MAX_DEPTH = 64
"""Of lists and objects in one another: templates and encoders go down by themselves."""
MAX_DIGITS = 400
"""Of an integer; a float holds none of more than 309."""
MAX_ELEMENTS = 32768
"""Of values in all lists and objects of a body: each takes microseconds of the one loop that serves everybody."""
SHOWN_CHARS = 64


def read_object(body: bytes) -> dict[str, Any]:
    """The object. Raises `Refusal`."""
    if not body.strip():
        raise Refusal(400, "the body is empty: it must be a JSON object", code="invalid_json")
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refusal(
            400, f"the body is no UTF-8: byte {error.start} begins no character", code="invalid_utf8"
        ) from None
    _check_elements(body)
    try:
        given = json.loads(
            text,
            parse_constant=_out_of_range,
            parse_float=_finite,
            parse_int=_integer,
            object_pairs_hook=_with_each_key_once,
        )
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise Refusal(400, f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(given, dict):
        raise Refusal(400, "the body is no JSON object", code="invalid_json")
    _check_depth(given)
    if "\\u" in text:  # an escape may be half of a character
        _check_characters(given)
    return given


def _check_elements(body: bytes) -> None:
    """Before anything is made of them. What is no string lies between quotes, less those that are escaped.

    Ends of lists and objects are counted: what has none is nested, of which the parser has a bound of its own.
    """
    if body.count(b",") + body.count(b"]") + body.count(b"}") <= MAX_ELEMENTS:
        return
    parts = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"', 4 * MAX_ELEMENTS)  # keys are strings, too
    count = sum(part.count(mark) for part in parts[::2] for mark in (b",", b"]", b"}"))
    if count > MAX_ELEMENTS or len(parts) > 4 * MAX_ELEMENTS:
        raise Refusal(
            400, f"the body has more than {MAX_ELEMENTS} values in its lists and objects", code="too_many_elements"
        )


def _check_depth(given: Any) -> None:
    level: list[Any] = [given]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> Refusal:
    return Refusal(
        400, f"the body is nested too deep: more than {MAX_DEPTH} lists and objects within one another",
        code="nested_too_deep",
    )  # fmt: skip


def _check_characters(given: Any) -> None:
    try:
        json.dumps(given, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Refusal(
            400, "a string of the body has half of a character: a \\ud800 to \\udfff without its other half",
            code="invalid_utf8",
        ) from None  # fmt: skip


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise Refusal(400, f"the key {_shown(twice)} stands twice in one object", code="duplicate_key")
    return found


def _out_of_range(text: str) -> NoReturn:
    raise Refusal(400, f"{_shown(text)} is no number of JSON, or beyond all that can be held: a number is finite",
                  code="number_out_of_range")  # fmt: skip


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _out_of_range(text)


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise Refusal(
            400, f"an integer of {len(text)} digits: at most {MAX_DIGITS} are taken", code="number_out_of_range"
        )
    return int(text)


def _shown(text: str) -> str:
    """What may be said back: escaped, and no longer than one reads."""
    return ascii(text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "...")
