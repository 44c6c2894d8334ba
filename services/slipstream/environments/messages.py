"""Messages of a conversation, in OpenAI's shape as plain dataclasses, and to and from its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.environments.json_text import read_json

Role = Literal["system", "user", "assistant", "tool"]
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asked for."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    """What the answer's `tool_call_id` is."""


@dataclass(frozen=True)
class ToolSpec:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of its arguments."""

    def as_json(self) -> dict[str, Any]:
        """OpenAI's form, which chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Message:
    """One message."""

    role: Role
    content: str = ""

    tool_calls: tuple[ToolCall, ...] = ()
    """Of the assistant."""

    tool_call_id: str = ""
    """With the role "tool": which call this answers."""

    name: str = ""
    """With the role "tool": which function answers."""

    reasoning: str = ""
    """Of the assistant: what it thought before it answered, where the model marks that."""

    stopped: bool = True
    """Of the assistant: it drew the end token; otherwise it was cut at a length limit."""

    def as_json(self) -> dict[str, Any]:
        """What chat templates expect: OpenAI's form, but with `arguments` as an object."""
        shown: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            shown["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in self.tool_calls
            ]
        if self.reasoning:
            shown["reasoning_content"] = self.reasoning
        if self.role == "tool":
            shown["tool_call_id"] = self.tool_call_id
            if self.name:
                shown["name"] = self.name
        return shown


def message_from_json(given: Mapping[str, Any]) -> Message:
    """Of OpenAI's form; `arguments` may be JSON text or an object. Raises `ValueError`, beginning with the field."""
    role = ROLES.get(str(given.get("role")))
    if role is None:
        raise ValueError(f"role: {given.get('role')!r} is none of {', '.join(ROLES)}")
    return Message(
        role=role,
        content=_text(given.get("content")),
        tool_calls=tuple(_call(call, index) for index, call in enumerate(given.get("tool_calls") or ())),
        tool_call_id=str(given.get("tool_call_id") or ""),
        name=str(given.get("name") or ""),
        reasoning=str(given.get("reasoning_content") or given.get("reasoning") or ""),
    )


def tool_from_json(given: Mapping[str, Any]) -> ToolSpec:
    """Of OpenAI's form. Raises `ValueError`."""
    function = given.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("function.name: a tool is a function with a name")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise ValueError("function.parameters: a JSON schema is an object")
    return ToolSpec(function["name"], str(function.get("description") or ""), dict(parameters))


def said_the_same(one: Message, other: Message) -> bool:
    """Whether they are one message, as far as a client that sends it back would keep it.

    Clients trim text, leave reasoning out, and write arguments and ids of calls anew.
    """
    calls = [[(call.name, dict(call.arguments)) for call in each.tool_calls] for each in (one, other)]
    return (
        one.role == other.role
        and one.content.strip() == other.content.strip()
        and calls[0] == calls[1]
        and (one.role != "tool" or one.tool_call_id == other.tool_call_id)
        and (not (one.reasoning and other.reasoning) or one.reasoning.strip() == other.reasoning.strip())
    )


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        return "".join(str(part.get("text") or "") for part in content)
    raise ValueError("content: text, or parts of the type text")


def _call(given: Any, index: int) -> ToolCall:
    where = f"tool_calls.{index}"
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}.function.name: a call names a function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except ValueError:
            raise ValueError(f"{where}.function.arguments: no JSON of finite numbers and whole characters") from None
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{where}.function.arguments: not an object")
    return ToolCall(function["name"], dict(arguments), str(given.get("id") or ""))
