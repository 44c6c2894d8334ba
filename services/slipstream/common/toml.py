"""Writes TOML; the standard library only reads it."""

# Values to write are of any type that TOML has.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def dump_toml(config: BaseModel) -> str:
    """The config as TOML that loads back to an equal config. Unset optional values are left out."""
    return dump_table(config.model_dump(mode="json", exclude_none=True))


def dump_table(table: dict[str, Any]) -> str:
    """A plain table as TOML."""
    lines: list[str] = []
    _dump_table(table, [], lines)
    return "\n".join(lines).strip() + "\n"


def _dump_table(table: dict[str, Any], path: list[str], lines: list[str]) -> None:
    """Write scalars of `table`, then its tables, then its lists of tables, as TOML demands."""
    nested = {key: value for key, value in table.items() if isinstance(value, dict)}
    arrays = {key: v for key, v in table.items() if isinstance(v, list) and v and all(isinstance(i, dict) for i in v)}
    for key, value in table.items():
        if key not in nested and key not in arrays:
            lines.append(f"{_toml_key(key)} = {_toml_value(value)}")
    for key, value in nested.items():
        lines += ["", f"[{'.'.join(map(_toml_key, [*path, key]))}]"]
        _dump_table(value, [*path, key], lines)
    for key, items in arrays.items():
        for item in items:
            lines += ["", f"[[{'.'.join(map(_toml_key, [*path, key]))}]]"]
            _dump_table(item, [*path, key], lines)


def _toml_key(key: str) -> str:
    return key if key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_toml_key(k)} = {_toml_value(v)}' for k, v in value.items())}}}"
    escaped = "".join(_toml_character(c) for c in str(value))
    return f'"{escaped}"'


def _toml_character(c: str) -> str:
    if c in '"\\':
        return "\\" + c
    return f"\\u{ord(c):04x}" if ord(c) < 0x20 or ord(c) == 0x7F else c
