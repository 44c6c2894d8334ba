"""From TOML files and flags to one config: defaults < files from left to right < flags from left to right."""

# What a TOML file holds is unknown until it is validated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from slipstream.common.config_errors import ConfigError, Origins, explanations, located, shown, suggest, together
from slipstream.common.config_types import (
    annotation_at,
    free_table,
    holds_list,
    item_annotation,
    members,
    models,
    tag,
    takes_only_text,
    wrong_kind,
)

Model = TypeVar("Model", bound=BaseModel)

MAX_FILE_BYTES = 1 << 20
INT64 = range(-(2**63), 2**63)
UNITS = {"_ms": "milliseconds", "_s": "seconds", "_bytes": "bytes"}
TOML_PLACE = re.compile(r"^(?P<what>.*) \(at (?P<place>.*)\)$", re.DOTALL)


def load_config(config_class: type[Model], files: Sequence[Path | str], overrides: Sequence[str] = ()) -> Model:
    """Build a config from TOML files and `section.field=value` overrides. Raises `ConfigError`."""
    return load_with_origins(config_class, files, overrides)[0]


def load_with_origins(
    config_class: type[Model], files: Sequence[Path | str], overrides: Sequence[str] = ()
) -> tuple[Model, Origins]:
    """The same, and the file or flag that each value came from."""
    data: dict[str, Any] = {}
    origins = Origins()
    for file in files:
        values = _normalise(read_toml(Path(file)), config_class)
        _lay(data, values, str(file), origins)
    for override in overrides:
        path, _, text = override.partition("=")
        names = [key.replace("-", "_") for key in path.split(".")]
        names = _indexed(data, names, path)
        annotation = annotation_at(config_class, names)
        value = _parse_value(text, annotation)
        if holds_list(annotation) and text in map(tag, models(annotation)):
            path = f"{path}.{_add_item(data, names)}"
            names, value = [*names, path.rpartition(".")[2]], {"type": text}
        values = _normalise(_nest(_raw(path, names), value), config_class)
        _lay(data, values, f"--{path}", origins)
    problems = {
        keys: f"{located(origins.place(keys), '.'.join(keys))}: must be {_with_unit(meant, keys)} (got {shown(value)})"
        for keys, value, meant in _misfits(data, config_class, ())
    }
    try:
        config = config_class.model_validate(data)
    except ValidationError as error:
        raise ConfigError(together((explanations(config_class, error, origins) | problems).values())) from None
    if problems:
        raise ConfigError(together(problems.values()))
    return config, origins


def _with_unit(meant: str, keys: tuple[str, ...]) -> str:
    """What should stand there, a number with the unit that the end of the name says."""
    units = [unit for end, unit in UNITS.items() if keys and keys[-1].endswith(end)]
    return f"{meant} of {units[0]}" if units and meant.endswith("number") else meant


def read_toml(path: Path) -> dict[str, Any]:
    """The file's table. Raises `ConfigError` with line and column of what is wrong."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{suggest(_near(path))}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory, not a TOML file{_one_of(path)}") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_FILE_BYTES >> 20} MiB; that is no configuration")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_not_toml(path, data.decode("utf-8"), str(error))) from None
    except RecursionError:
        raise ConfigError(f"{path}: not TOML: nested too deeply") from None


def _not_toml(path: Path, text: str, message: str) -> str:
    match = TOML_PLACE.match(message)
    what, place = (match["what"], match["place"]) if match else (message, "")
    if what.startswith(("Cannot overwrite", "Cannot declare", "Cannot mutate")):
        what = "this key or table stands in the file already; a key can be set once"
    number = re.match(r"line (\d+)", place)
    lines = text.split("\n")
    quoted = ""
    if number and int(number[1]) <= len(lines) and (line := lines[int(number[1]) - 1].strip()):
        quoted = f", in {shown(line)}"
    return f"{path}{f', {place}' if place else ''}: not TOML: {what[:1].lower()}{what[1:]}{quoted}"


def _tomls(directory: Path) -> list[Path]:
    try:
        return sorted(directory.glob("*.toml"))
    except (OSError, ValueError):
        return []


def _near(path: Path) -> list[str]:
    """The file that may be meant, with its folder: beside the missing one, or among the examples."""
    names = {file.name: file for folder in (path.parent / "examples", path.parent) for file in _tomls(folder)}
    return [str(names[name]) for name in difflib.get_close_matches(path.name, names, n=1)]


def _one_of(directory: Path) -> str:
    found = _tomls(directory)
    return f"; did you mean {str(found[0])!r}?" if found else ""


def _normalise(value: Any, annotation: Any) -> Any:
    """Write dashes in field names as underscores; keys of free tables, such as names of peers, stay as they are."""
    if isinstance(value, list):
        return [_normalise(item, annotation) for item in value]
    if not isinstance(value, dict):
        return value
    found = models(annotation)
    by_index = holds_list(annotation) and all(key.isdecimal() for key in value)  # of a flag
    if free_table(annotation) or by_index:
        return {key: _normalise(item, item_annotation(annotation)) for key, item in value.items()}
    if not found:
        return value
    table = {}
    for key, item in value.items():
        name = key.replace("-", "_")
        if name in table:
            raise ConfigError(f"{name!r} is set twice, as {name!r} and as {key!r}")
        field = next((m.model_fields[name] for m in found if name in m.model_fields), None)
        table[name] = _normalise(item, field.annotation if field else None)
    return table


def _lay(data: dict[str, Any], values: dict[str, Any], place: str, origins: Origins) -> None:
    origins.record(values, place)
    _merge(data, values)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> None:
    """Lay `over` on `base`: tables merge, a table of another variant and everything else replaces."""
    for key, value in over.items():
        old = base.get(key)
        if isinstance(value, dict) and isinstance(old, list) and all(index.isdecimal() for index in value):
            for index, item in value.items():
                holder = {"item": old[int(index)]}
                _merge(holder, {"item": item})
                old[int(index)] = holder["item"]
        elif (
            isinstance(value, dict) and isinstance(old, dict) and value.get("type", old.get("type")) == old.get("type")
        ):
            _merge(old, value)
        else:
            base[key] = value


def _indexed(data: dict[str, Any], names: list[str], path: str) -> list[str]:
    """Keys of a flag, with a list's item given by number or by name put as its number."""
    at: Any = data
    found: list[str] = []
    for name, written in zip(names, path.split("."), strict=True):
        if isinstance(at, list):
            known = [str(item.get("name") or item.get("type")) if isinstance(item, dict) else "" for item in at]
            if written in known or name in known:
                name = str(known.index(written if written in known else name))
            if not name.isdecimal() or int(name) >= len(at):
                items = ", ".join(f"{index} ({one})" if one else str(index) for index, one in enumerate(known))
                raise ConfigError(f"--{path}: {'.'.join(found)} has no item {written!r}; it has {items or 'none'}")
            at = at[int(name)]
        else:
            at = at.get(name) if isinstance(at, dict) else None
        found.append(name)
    return found


def _add_item(data: dict[str, Any], names: list[str]) -> int:
    """Make room for one more item in the list at `names`; returns its index. A flag that names a variant adds one."""
    at: Any = data
    for name in names[:-1]:
        at = at[int(name)] if isinstance(at, list) else at.setdefault(name, {})
    items: list[Any] = at.setdefault(names[-1], [])
    items.append({})
    return len(items) - 1


def _raw(path: str, names: list[str]) -> list[str]:
    """Keys as written, as a free table may have dashes in its own, but for indices."""
    return [n if n.isdecimal() else written for written, n in zip(path.split("."), names, strict=True)]


def _nest(keys: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return value


def _parse_value(text: str, annotation: Any) -> Any:
    """A flag's text as a TOML value; text that is not TOML, or that a string field takes, is a string."""
    if annotation is not None and takes_only_text(annotation):
        return text
    try:
        table = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text


def _misfits(value: Any, annotation: Any, at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """Values that pydantic would bend to fit, and integers that no TOML writer and no message can hold."""
    if isinstance(value, int) and not isinstance(value, bool) and value not in INT64:
        yield at, value, "a whole number of 64 bits"
    elif isinstance(value, list):
        inner = item_annotation(annotation)
        for index, item in enumerate(value):
            yield from _misfits(item, inner, (*at, str(index)))
    elif isinstance(value, dict):
        tables: list[Any] = [m for m in members(annotation) if isinstance(m, type) and m is not dict]
        found: list[Any] = list(models(annotation)) or tables
        for key, item in value.items():
            fields = [m.model_fields[key] for m in found if issubclass(m, BaseModel) and key in m.model_fields]
            inner = fields[0].annotation if fields else item_annotation(annotation) if free_table(annotation) else None
            yield from _misfits(item, inner, (*at, key))
    elif annotation is not None and (meant := wrong_kind(value, annotation)):
        yield at, value, meant
