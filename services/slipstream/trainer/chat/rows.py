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
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"no JSON: {error}") from None


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
    if not isinstance(value, dict):
        return BadRow(file, line, f"a {type(value).__name__}, no object with messages")
    try:
        conversation = _Conversation.model_validate(value)
    except ValidationError as error:
        return BadRow(file, line, _first_problem(error))
    messages = [message.model_dump(exclude_none=True) for message in conversation.messages]
    return Row(file, line, [{"content": "", **message} for message in messages], conversation.tools or None)


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    said = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {said}" if where else said
