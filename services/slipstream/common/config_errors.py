"""What is wrong with a configuration, in one line: file or flag, key, what is wrong, what was meant."""

# What a TOML file holds is unknown until it is validated.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from slipstream.common.config_types import choices, holds_list, item_annotation, models, tag

SHOWN_VALUE_CHARACTERS = 60
MAX_PROBLEMS = 5
"""Told of one configuration."""
MAX_MEANT = 3
"""Keys that are told where any of them may be meant."""

MESSAGES = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of 64 bits",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text, in quotes",
    "path_type": "must be a path, in quotes",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
}
"""In our words, by pydantic's type of error; `{}` are its parameters."""


PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9_.-]*$": "letters, digits, _, . and -, and first a letter or digit",
    r"^[A-Za-z0-9_.-]+$": "letters, digits, _, . and -",
    r"^[A-Za-z0-9_.-]*$": "letters, digits, _, . and -",
    r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$": "package.module:name",
}
"""What a pattern says, in words."""


class ConfigError(Exception):
    """A config that cannot be used, in one sentence with its place. Always one line, whatever stood in the file."""

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message))


class Origins:
    """The file or flag that each value came from."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, ...], str] = {}

    def record(self, value: Any, place: str, at: tuple[str, ...] = ()) -> None:
        """Remember `place` for everything below `at`."""
        if at:
            self._places[at] = place
        if isinstance(value, dict):
            for key, item in value.items():
                self.record(item, place, (*at, key))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                self.record(item, place, (*at, str(index)))

    def place(self, keys: Sequence[str]) -> str:
        """Where the value at `keys`, or the nearest table around it, came from; empty for a default."""
        at = tuple(keys)
        return next((self._places[at[:n]] for n in range(len(at), 0, -1) if at[:n] in self._places), "")

    def located(self, dotted: str, *others: str) -> str:
        """The key with its place, else the place of the first of `others` that has one: the start of a message."""
        place = next((place for key in (dotted, *others) if (place := self._places.get(tuple(key.split("."))))), "")
        return located(place, dotted)


def located(place: str, dotted: str) -> str:
    """`file: key`; a flag is its own key."""
    if place.startswith("--") and place[2:].replace("-", "_") == dotted.replace("-", "_"):
        return place
    return f"{place}: {dotted}" if place else dotted


def explain(config_class: type[BaseModel], error: ValidationError, origins: Origins, section: str = "") -> str:
    """Every problem of a validation error, in one line. `section` is where `config_class` stands in the file."""
    return together(explanations(config_class, error, origins, section).values())


def explanations(
    config_class: type[BaseModel], error: ValidationError, origins: Origins, section: str = ""
) -> dict[tuple[str, ...], str]:
    """The first problem of each key, unknown keys first."""
    found: dict[tuple[str, ...], str] = {}
    for problem in sorted(error.errors(include_url=False), key=lambda p: p["type"] != "extra_forbidden"):
        keys = tuple(real_keys(config_class, problem["loc"]))
        if keys not in found:
            found[keys] = _explained(config_class, problem, origins, section)
    return found


def together(sentences: Iterable[str]) -> str:
    """Several of them as one line; of many, the first."""
    every = list(dict.fromkeys(sentences))
    more = len(every) - MAX_PROBLEMS
    return "; and ".join(every[:MAX_PROBLEMS] + ([f"{more} more"] if more > 0 else []))


def _explained(config_class: type[BaseModel], problem: Any, origins: Origins, section: str) -> str:
    below = real_keys(config_class, problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":  # a rule over several fields names the one to change, `field: ...`
        name, colon, rest = message.partition(": ")
        if colon and name.replace(".", "_").isidentifier():
            below, message = [*below, *name.split(".")], rest
    keys = [*([section] if section else []), *below]
    place = origins.place(keys)
    dotted = ".".join(keys) if keys else config_class.__name__
    where = located(place, dotted)
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        near = near_keys(config_class, below)
        meant = [f"{section}.{name}" if section else name for name in near]
        hint = suggest(meant) or for_another_type(config_class, below, section)
        return f"{f'{place}: ' if place else ''}unknown key {dotted!r}{hint}"
    if kind == "missing":  # it has no place itself, and a flag near it is another key
        if place.startswith("--"):
            return f"{dotted} is required beside {place}"
        table = (
            "" if place or not _list_of_tables(config_class, below) else f": [[{dotted}]] in a file before its overlays"
        )
        return f"{where} is required{table}"
    if kind == "union_tag_not_found":
        return f"{where}.type is required; it is one of {_tags(config_class, below)}"
    given = problem.get("input")
    if kind == "union_tag_invalid":
        tags, found = _tags(config_class, below), str(context.get("tag", ""))
        near = nearest(found, tags.split(", "))
        given_at = located(origins.place([*keys, "type"]), f"{dotted}.type")
        return f"{given_at}: {found!r} is none of {tags}{suggest(near)}"
    got = "" if isinstance(given, dict | list | BaseModel) else f" (got {shown(given)})"
    if kind == "literal_error":
        expected = str(context["expected"])
        near = nearest(str(given), expected.replace("'", "").replace(" or ", ", ").split(", "))
        return f"{where}: must be {expected}{got}{suggest(near)}"
    if kind == "list_type" and _list_of_tables(config_class, below):
        if place.startswith("--") and (tags := _tags(config_class, below)):
            return f"{where}: {given!r} is none of {tags}{suggest(nearest(str(given), tags.split(', ')))}"
        return f"{where}: must be a list of tables, each below [[{dotted}]]{got}"
    limits = {name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()}
    text = MESSAGES[kind].format(**limits) if kind in MESSAGES else f"{message[:1].lower()}{message[1:]}"
    if words := PATTERNS.get(str(context.get("pattern", ""))):
        text = f"{text}, that is {words}"
    return f"{where}: {text.replace('at least 1 items', 'at least one item')}{got}"


def shown(value: Any) -> str:
    """A value as it may stand in a message: not longer than half a line."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= SHOWN_VALUE_CHARACTERS else f"{text[:SHOWN_VALUE_CHARACTERS]}…"


def suggest(near: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def nearest(word: str, known: Sequence[str]) -> list[str]:
    """What of these small words may be meant, at most one: the same letters in another order first."""
    small = word.lower()
    return [name for name in known if sorted(name) == sorted(small)][:1] or difflib.get_close_matches(small, known, n=1)


def real_keys(config_class: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Keys as written in TOML: pydantic puts the tag or class name of a union's variant into its location."""
    found: list[type[BaseModel]] = [config_class]
    keys: list[str] = []
    for index, part in enumerate(loc):
        fields = [m.model_fields[str(part)] for m in found if str(part) in m.model_fields]
        if fields:
            found = [n for field in fields for n in models(field.annotation)]
        elif isinstance(part, str) and keys and any(_has_tag(model, part) for model in found):
            found = [m for m in found if _has_tag(m, part)]
            continue
        elif isinstance(part, str) and index < len(loc) - 1 and "[" in part:
            continue
        keys.append(str(part))
    return keys


def holders(config_class: type[BaseModel], keys: list[str]) -> list[type[BaseModel]]:
    """The models that may hold the last key: all variants of its table."""
    found: list[type[BaseModel]] = [config_class]
    for key in keys[:-1]:
        found = [n for m in found if key in m.model_fields for n in models(m.model_fields[key].annotation)] or found
    return found


def for_another_type(config_class: type[BaseModel], keys: list[str], section: str) -> str:
    """A hint that a key is known, but not beside this `type`."""
    owners = [
        model
        for model in holders(config_class, keys)
        if keys[-1] in model.model_fields and "type" in model.model_fields
    ]
    names = sorted({name for model in owners for name in choices(model.model_fields["type"].annotation)})
    if not names:
        return ""
    dotted = ".".join([*([section] if section else []), *keys[:-1], "type"])
    return f"; it is known beside {dotted} = {' or '.join(map(repr, names))} only"


def near_keys(config_class: type[BaseModel], keys: list[str]) -> list[str]:
    """What may have been meant by a wrong last key: the same name below its table, a sibling, the name elsewhere."""
    siblings = [name for model in holders(config_class, keys) for name in model.model_fields]
    if keys[-1] in siblings:
        return []
    every = {".".join(path): path[-1] for path in leaf_paths(config_class)}
    below = [
        dotted for dotted, name in every.items() if name == keys[-1] and dotted.startswith(".".join([*keys[:-1], ""]))
    ]
    near = difflib.get_close_matches(keys[-1], siblings, n=1)
    if len(keys) > 1 and below:
        return below[:MAX_MEANT]
    if near:
        return [".".join([*keys[:-1], near[0]])]
    wanted = difflib.get_close_matches(keys[-1], every.values(), n=1, cutoff=0.75)
    beside = [dotted for dotted, name in every.items() if name in wanted and dotted.startswith(f"{keys[0]}.")]
    return (
        [dotted for dotted, name in every.items() if name == keys[-1]][:MAX_MEANT]
        or beside[:1]
        or [dotted for dotted, name in every.items() if name in wanted][:1]
        or difflib.get_close_matches(
            ".".join(keys), [dotted for dotted, name in every.items() if name[:1] == keys[-1][:1]], n=1
        )
    )


def leaf_paths(config_class: type[BaseModel], at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every field below `config_class` that can be set by a flag of its own."""
    paths: list[tuple[str, ...]] = []
    for name, field in config_class.model_fields.items():
        nested = [] if holds_list(field.annotation) or item_annotation(field.annotation) else models(field.annotation)
        for model in nested:
            paths += leaf_paths(model, (*at, name))
        if not nested:
            paths.append((*at, name))
    return list(dict.fromkeys(paths))


def _list_of_tables(config_class: type[BaseModel], keys: Sequence[str]) -> bool:
    """Whether the last key holds a list of tables."""
    fields = [model.model_fields.get(keys[-1]) for model in holders(config_class, list(keys))] if keys else []
    return any(field is not None and holds_list(field.annotation) and models(field.annotation) for field in fields)


def _has_tag(model: type[BaseModel], part: str) -> bool:
    field = model.model_fields.get("type")
    return model.__name__ == part or (field is not None and part in choices(field.annotation))


def _tags(config_class: type[BaseModel], keys: Sequence[str]) -> str:
    """Every `type` that the union at `keys` knows."""
    found: list[type[BaseModel]] = [config_class]
    for key in keys:
        found = [n for m in found if key in m.model_fields for n in models(m.model_fields[key].annotation)] or found
    return ", ".join(word for model in found if (word := tag(model)))
