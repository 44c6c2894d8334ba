"""Conversations from a JSONL file, and what is wrong with the others, by line and field. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from slipstream.common.config import ConfigError

MAX_ROW_BYTES = 16 << 20
MAX_DEPTH = 100
"""Of lists and objects in one another: what templates do with them takes stack."""

_TOO_DEEP = "lists and objects in one another are too deep"
_HALF = "holds half of a surrogate pair, which is no text"
_TOLD_PATH = 10
"""Parts of a path that are told."""


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used."""

    file: Path
    line: int
    """From 1."""
    why: str
    """Begins with the field, if it is one."""

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.why}"


@dataclass(frozen=True)
class Row:
    """A conversation, as a chat template takes it."""

    file: Path
    line: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


class _Text(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class _Function(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)
    arguments: dict[str, Any]

    @field_validator("arguments", mode="before")
    @classmethod
    def _parsed(cls, value: Any) -> Any:
        """OpenAI's API has them as JSON in a string, templates want the object."""
        if not isinstance(value, str):
            return value
        try:
            parsed = json.loads(value)
        except ValueError as error:
            raise ValueError(f"no JSON: {error}") from None
        except RecursionError:
            raise ValueError(_TOO_DEEP) from None
        problem = _unusable(parsed)
        if problem is not None:
            raise ValueError(problem)
        return parsed


class _ToolCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: _Function


class _Message(BaseModel):
    """What else it has, a template may use."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[_ToolCall] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        return "".join(_Text.model_validate(part).text for part in value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _said(self) -> _Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a {self.role!r} has tool_calls; only the assistant calls tools")
        if self.content is None and not self.tool_calls:
            raise ValueError("neither content nor tool_calls")
        return self


class _Conversation(BaseModel):
    """A row; other keys of it are ignored."""

    messages: list[_Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None


def read_rows(file: Path) -> Iterator[Row | BadRow]:
    """All rows in their order; empty lines are none. Raises `ConfigError` where the file cannot be read."""
    try:
        with file.open("rb") as handle:
            line = 0
            while data := handle.readline(MAX_ROW_BYTES + 1):
                line += 1
                if len(data) > MAX_ROW_BYTES:
                    yield BadRow(file, line, f"longer than {MAX_ROW_BYTES} bytes")
                    while data and not data.endswith(b"\n"):
                        data = handle.readline(MAX_ROW_BYTES)
                elif data.strip():
                    yield _read(file, line, data)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None


def _read(file: Path, line: int, data: bytes) -> Row | BadRow:
    try:
        value = json.loads(data)
    except ValueError as error:  # a UnicodeDecodeError too
        return BadRow(file, line, f"no JSON: {error}")
    except RecursionError:
        return BadRow(file, line, _TOO_DEEP)
    if not isinstance(value, dict):
        return BadRow(file, line, f"a {type(value).__name__}, no object with messages")
    problem = _unusable({key: value[key] for key in _Conversation.model_fields if key in value})
    if problem is not None:
        return BadRow(file, line, problem)
    try:
        conversation = _Conversation.model_validate(value)
    except ValidationError as error:
        return BadRow(file, line, _first_problem(error))
    messages = [message.model_dump(exclude_none=True) for message in conversation.messages]
    return Row(file, line, [{"content": "", **message} for message in messages], conversation.tools or None)


def _unusable(value: Any) -> str | None:
    """What no template or tokenizer takes, though it is JSON; begins with the field."""
    found = _find_unusable(value, ())
    if found is None:
        return None
    path, why = found
    where = ".".join(path[:_TOLD_PATH]).encode("ascii", "backslashreplace").decode()
    return f"{where}: {why}" if where else why


def _find_unusable(value: Any, path: tuple[str, ...]) -> tuple[tuple[str, ...], str] | None:
    if isinstance(value, str):
        return None if _is_text(value) else (path, _HALF)
    if not isinstance(value, dict | list):
        return None
    if len(path) > MAX_DEPTH:
        return path, _TOO_DEEP
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        inside = (*path, str(key))
        found = _find_unusable(item, inside) if _is_text(str(key)) else (inside, _HALF)
        if found is not None:
            return found
    return None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    said = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {said}" if where else said
