"""What the type of a config field says: its alternatives, the config classes it can hold, its kind in words."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel


def members(annotation: Any) -> Iterator[Any]:
    """The alternatives of a type: of `A | B`, of `Annotated[A | B, ...]`."""
    if get_origin(annotation) is Annotated:
        yield from members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for argument in get_args(annotation):
            yield from members(argument)
    else:
        yield annotation


def models(annotation: Any) -> list[type[BaseModel]]:
    """The config classes that a field, or each item of a list or table field, can hold."""
    found: list[type[BaseModel]] = []
    for member in members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            found.append(member)
        elif get_origin(member) in (list, tuple, dict):
            for argument in get_args(member):
                found += models(argument)
    return found


def item_annotation(annotation: Any) -> Any:
    """Type of the items of a list field or of the values of a table field; None where it is neither."""
    for member in members(annotation):
        if get_origin(member) in (list, tuple, dict):
            return get_args(member)[-1 if get_origin(member) is dict else 0]
    return None


def free_table(annotation: Any) -> bool:
    """Whether the keys are the user's own, such as names of peers."""
    return any(get_origin(member) is dict for member in members(annotation))


def holds_list(annotation: Any) -> bool:
    return any(get_origin(member) in (list, tuple) for member in members(annotation))


def choices(annotation: Any) -> list[str]:
    """The words of a field that takes one of several."""
    return [str(v) for m in members(annotation) if get_origin(m) is Literal for v in get_args(m)]


def tag(model: type[BaseModel]) -> str | None:
    """The `type` by which a variant of a union is chosen, or None."""
    field = model.model_fields.get("type")
    words = choices(field.annotation) if field else []
    return words[0] if words else None


def annotation_at(config_class: type[BaseModel], keys: Sequence[str]) -> Any:
    """Type of the field at `keys`, or None where there is none. A key that follows a list names one of its items."""
    found: list[type[BaseModel]] = [config_class]
    annotation = None
    for key in keys:
        if annotation is not None and (holds_list(annotation) or free_table(annotation)):
            annotation = item_annotation(annotation)
        else:
            field = next((m.model_fields[key] for m in found if key in m.model_fields), None)
            if field is None:
                return None
            annotation = field.annotation
        found = models(annotation)
    return annotation


def takes_only_text(annotation: Any) -> bool:
    kinds = set(members(annotation)) - {type(None)}
    return bool(kinds) and all(kind in (str, Path) or get_origin(kind) is Literal for kind in kinds)


def wrong_kind(value: Any, annotation: Any) -> str | None:
    """What should stand there in place of a value that pydantic would bend to fit, such as "8" or true for a number."""
    kinds = [kind for kind in members(annotation) if kind is not type(None)]
    if isinstance(value, bool) and kinds and all(kind in (int, float) for kind in kinds):
        return "a whole number" if int in kinds else "a number"
    if isinstance(value, str) and kinds and all(kind in (int, float, bool) for kind in kinds):
        return "true or false" if bool in kinds else "a whole number" if int in kinds else "a number"
    if isinstance(value, int) and not isinstance(value, bool) and kinds == [bool]:
        return "true or false"
    return None
