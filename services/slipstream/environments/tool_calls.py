"""What a model wrote in one turn, as a message: reasoning, text, and tool calls in the form of Hermes and Qwen.

<think>reasoning</think>text<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.environments.json_text import read_json
from slipstream.environments.messages import Message, ToolCall

THINK, THOUGHT = "<think>", "</think>"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
MAX_SHOWN_CHARACTERS = 200
"""Of a malformed call, in the message that says what is wrong with it."""


@dataclass(frozen=True)
class Parsed:
    """A turn of the model."""

    message: Message
    refusals: tuple[Message, ...] = ()
    """What the model is told of calls that are none: malformed ones, and of tools that do not exist."""


def parse(
    text: str, *, tools: Collection[str], stopped: bool = True, thinking: bool = False, first_id: str = "call"
) -> Parsed:
    """Read a turn. Where there are no `tools`, text that looks like a call is text.

    `thinking`: its prompt ended within the reasoning. Ids of calls are `first_id` with a number.
    """
    reasoning, content = _split_reasoning(text, thinking)
    if not tools:
        return Parsed(Message("assistant", content.strip(), reasoning=reasoning.strip(), stopped=stopped))
    calls: list[ToolCall] = []
    refusals: list[Message] = []
    for number, found in enumerate(_CALL.finditer(content)):
        call_id = f"{first_id}-{number}"
        call = _read(found.group(1), call_id, tools)
        if isinstance(call, str):
            refusals.append(Message("tool", call, tool_call_id=call_id))
        else:
            calls.append(call)
    message = Message(
        "assistant",
        (_CALL.sub("", content) if not refusals else _CALL.sub(_keep_malformed(tools), content)).strip(),
        tool_calls=tuple(calls),
        reasoning=reasoning.strip(),
        stopped=stopped,
    )
    return Parsed(message, tuple(refusals))


def _split_reasoning(text: str, thinking: bool) -> tuple[str, str]:
    opened = text.lstrip().startswith(THINK)
    if not (opened or thinking):
        return "", text
    inside = text.lstrip().removeprefix(THINK) if opened else text
    reasoning, _, content = inside.partition(THOUGHT)
    return reasoning, content


def _keep_malformed(tools: Collection[str]) -> Any:
    """What was no call stays in the text: later turns show it as it was said."""
    return lambda found: found.group(0) if isinstance(_read(found.group(1), "", tools), str) else ""


def _read(source: str, call_id: str, tools: Collection[str]) -> ToolCall | str:
    """The call, or what is wrong with it."""
    shown = source.strip()[:MAX_SHOWN_CHARACTERS]
    try:
        given = read_json(source)
    except ValueError:
        return f"error: this tool call is no JSON: {shown}"
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        return f'error: a tool call is {{"name": ..., "arguments": {{...}}}}, not {shown}'
    arguments = given.get("arguments", {})
    if isinstance(arguments, str):  # some models quote them once more
        try:
            arguments = read_json(arguments)
        except ValueError:
            return f"error: the arguments of this tool call are no JSON: {shown}"
    if not isinstance(arguments, Mapping):
        return f"error: the arguments of a tool call are an object, not {shown}"
    if given["name"] not in tools:
        return f"error: there is no tool {given['name']!r}; there are {', '.join(sorted(tools))}"
    return ToolCall(given["name"], dict(arguments), call_id)
