"""The help text of a command: every field with its unit, range, default and explanation, section by section."""

# Defaults are values of any type.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from slipstream.common.config_errors import ConfigError, suggest
from slipstream.common.config_types import choices, free_table, holds_list, item_annotation, members, models, tag

WIDTH = 110
UNITS = {
    "_s": "SECONDS", "_ms": "MILLISECONDS", "_bytes": "BYTES", "_tokens": "TOKENS", "_fraction": "FRACTION",
    "_share": "FRACTION", "_steps": "STEPS", "_count": "COUNT", "_blocks": "BLOCKS",
}  # fmt: skip
"""What stands for the value of a number, by the end of its name."""


def help_text(config_class: type[BaseModel], program: str, topic: str = "", also: str = "") -> str:
    """All fields, or those of the section `topic`. Raises `ConfigError` where there is no such section.

    `also` is what else the program takes.
    """
    lines = [
        f"usage: {program} [@ FILE.toml]... [--section.field=VALUE]... [--dry-run] [--help [SECTION]]",
        "",
        "Defaults < files from left to right < flags from left to right. --dry-run prints the result.",
        "An item of a list is set by its number or name: --environments.0.weight=2",
        *(["", also] if also else []),
    ]
    if not topic and config_class.__doc__:
        lines += ["", config_class.__doc__.strip().splitlines()[0]]
    if topic:
        lines += _apart(_topic(config_class, topic.replace("-", "_").split(".")))
    else:
        lines += _apart(list(_table(config_class, (), None)))
        sections = [name for name, field in config_class.model_fields.items() if models(field.annotation)]
        if sections:
            lines += ["", *wrap(f"--help SECTION shows one of: {', '.join(sections)}", WIDTH)]
    return "\n".join(lines)


def _apart(lines: list[str]) -> list[str]:
    """With one empty line before them."""
    return lines if lines[:1] == [""] else ["", *lines]


def _topic(config_class: type[BaseModel], keys: list[str]) -> list[str]:
    holders: list[type[BaseModel]] = [config_class]
    default: Any = None
    for depth, key in enumerate(keys):
        found = [(model, model.model_fields[key]) for model in holders if key in model.model_fields]
        if not found:
            names = [".".join([*keys[:depth], name]) for model in holders for name in model.model_fields]
            near = difflib.get_close_matches(".".join(keys[: depth + 1]), names, n=1)
            raise ConfigError(f"--help: there is no section {'.'.join(keys)!r}{suggest(near)}")
        model, field = found[0]
        default = _default(field, default if isinstance(default, model) else None, key)
        if depth == len(keys) - 1:
            return list(_field(tuple(keys[:-1]), key, field, default))
        holders = models(field.annotation)
    return []


def _table(model: type[BaseModel], at: tuple[str, ...], default: Any) -> Iterator[str]:
    """A section: plain fields first, as in TOML, then the sections in it."""
    ordered = sorted(model.model_fields.items(), key=lambda item: bool(models(item[1].annotation)))
    for name, field in ordered:
        yield from _field(at, name, field, _default(field, default, name))


def _field(at: tuple[str, ...], name: str, field: FieldInfo, default: Any) -> Iterator[str]:
    path, found = (*at, name), models(field.annotation)
    if not found:
        yield from _leaf(f"--{_flag(path)}", name, field, default)
        return
    yield ""
    if free_table(field.annotation) or holds_list(field.annotation):
        yield f"[[{'.'.join(path)}]]  a list of tables"
        yield from _wrapped(field.description)
        yield from _variants(found, path, None) if len(found) > 1 else _items(found[0])
        return
    yield f"[{'.'.join(path)}]"
    yield from _wrapped(field.description or (found[0].__doc__ if len(found) == 1 else ""))
    if len(found) > 1:
        yield from _variants(found, path, default)
    else:
        yield from _table(found[0], path, default)


def _variants(found: Sequence[type[BaseModel]], path: tuple[str, ...], default: Any) -> Iterator[str]:
    """A union: what all variants have once, then each by its `type`."""
    common = [name for name in found[0].model_fields if name != "type" and all(name in m.model_fields for m in found)]
    tags = [word for model in found if (word := tag(model))]
    chosen = f"  (default {tag(type(default))})" if default is not None else ""
    yield from wrap(f"type  {' | '.join(tags)}{chosen}", WIDTH, initial_indent="  ", subsequent_indent=" " * 8)
    parents = (cls for cls in found[0].__mro__[1:] if issubclass(cls, BaseModel))
    base = next((cls for cls in parents if common and common[0] in cls.model_fields), found[0])
    if common:
        yield "  of every type:"
        for name in common:
            field = base.model_fields.get(name, found[0].model_fields[name])
            yield from _indented(_inner(name, field, _default(field, None, name)))
    for model in found:
        yield f'  type = "{tag(model)}"'
        yield from _indented(_wrapped(model.__doc__))
        own = [f"{name} {_number(value)}" for name in common if (value := _own_default(base, model, name)) is not None]
        if own:
            yield f"    It has defaults of its own: {', '.join(own)}."
        for name, field in model.model_fields.items():
            if name not in common and name != "type":
                shown = _default(field, default if isinstance(default, model) else None, name)
                yield from _indented(_inner(name, field, shown))


def _inner(name: str, field: FieldInfo, default: Any) -> Iterator[str]:
    """A field of a variant; of a table its fields, by dotted names."""
    found = models(field.annotation)
    if len(found) != 1:
        yield from _leaf(name, name, field, default)
        return
    for key, inner in found[0].model_fields.items():
        held = default if isinstance(default, found[0]) else None
        yield from _leaf(f"{name}.{key}", key, inner, _default(inner, held, key))


def _own_default(base: type[BaseModel], model: type[BaseModel], name: str) -> float | None:
    """A number that this variant takes unless told, where the others take another."""
    default, usual = (_default(cls.model_fields[name], None, name) for cls in (model, base) if name in cls.model_fields)
    return default if default != usual and isinstance(default, int | float) else None


def _items(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield from _leaf(name, name, field, _default(field, None, name))


def _leaf(label: str, name: str, field: FieldInfo, default: Any) -> Iterator[str]:
    facts = [fact for fact in (_range(field), _shown_default(default)) if fact]
    noted = f"({', '.join(facts)})" if facts else ""
    kind = f"  {label} {_kind(name, field.annotation)}"
    yield from [f"{kind}  {noted}".rstrip()] if len(kind) + len(noted) <= WIDTH else [kind, f"      {noted}"]
    yield from _wrapped(field.description, indent=6)


def _indented(lines: Iterator[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _wrapped(text: str | None, indent: int = 2) -> Iterator[str]:
    for paragraph in (text or "").strip().split("\n\n")[:1]:
        yield from (f"{' ' * indent}{line}" for line in wrap(" ".join(paragraph.split()), WIDTH - indent))


def _flag(path: Sequence[str]) -> str:
    return ".".join(path).replace("_", "-")


def _kind(name: str, annotation: Any) -> str:
    """What to write for the value, in words."""
    if words := choices(annotation):
        return "|".join(words)
    kinds = [kind for kind in members(annotation) if kind is not type(None)]
    kind = kinds[0] if kinds else Any
    if get_origin(kind) in (list, tuple):
        inner = _kind(name, item_annotation(kind))
        fixed = [part for part in get_args(kind) if part is not Ellipsis]
        return f"[{', '.join([inner] * len(fixed))}]" if len(fixed) > 1 else f"[{inner}, ...]"
    if get_origin(kind) is dict or kind is dict:
        return "TABLE"
    if kind in (int, float):
        unit = next((unit for ending, unit in UNITS.items() if f"_{name}".endswith(ending)), "")
        return unit or ("INTEGER" if kind is int else "NUMBER")
    names: dict[Any, str] = {bool: "true|false", str: "TEXT", Path: "PATH"}
    return names.get(kind, "VALUE")


def _range(field: FieldInfo) -> str:
    limits = {key: getattr(m, key) for m in field.metadata for key in ("ge", "gt", "le", "lt") if hasattr(m, key)}
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    if "ge" in limits and "le" in limits:
        return f"{_number(limits['ge'])} to {_number(limits['le'])}"
    return ", ".join(f"{word} {_number(limits[key])}" for key, word in words.items() if key in limits)


def _number(value: float) -> str:
    if isinstance(value, int) and value >= 2**20 and value % 2**20 == 0:
        return f"{value >> 20} MiB"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _default(field: FieldInfo, holder: Any, name: str) -> Any:
    """The value without any setting: of the object around it where that has one of its own."""
    if holder is not None and holder is not PydanticUndefined:
        return getattr(holder, name)
    return PydanticUndefined if field.is_required() else field.get_default(call_default_factory=True)


def _shown_default(default: Any) -> str:
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "unset by default"
    if default == "" or default == [] or default == {}:
        return ""
    if isinstance(default, bool):
        return f"default {str(default).lower()}"
    if isinstance(default, list | tuple):
        return f"default [{', '.join(map(str, default))}]"
    return f"default {_number(default) if isinstance(default, int | float) else default}"
