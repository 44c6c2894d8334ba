"""How a model's conversations become tokens, and its tokens messages.

`Chat` renders by the model's chat template, whatever it is, and reads calls in the form of Hermes and Qwen.
`families.FamilyRenderer` has a model family's own way with both, by the library `renderers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.environments.draft import Draft
from slipstream.environments.messages import Message, ToolSpec
from slipstream.environments.tokenizer import TextCodec
from slipstream.environments.tool_calls import Parsed

CheckText = Callable[[str], None]
"""Raises `ContextTooLong` for a text that cannot fit, before it is encoded."""


@dataclass(frozen=True)
class Told:
    """A turn of the model's that a conversation goes on from."""

    prompt: str
    """As text."""

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    """What was sampled."""

    message: Message
    """What that said."""

    tools: Sequence[ToolSpec]
    ended: bool
    """It ended with an end token."""


@dataclass(frozen=True)
class Rendered:
    """A prompt, or the part of one that follows a turn."""

    text: str
    """Of the whole prompt."""

    token_ids: list[int]


class Renderer(Protocol):
    """One model's way with conversations. Raises `Unrenderable` for what it has no way for."""

    codec: TextCodec

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end the model's turn."""
        ...

    def show(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """What the model is to go on from, as text."""
        ...

    def begin(self, messages: Sequence[Message], tools: Sequence[ToolSpec], check: CheckText) -> Rendered:
        """A whole prompt."""
        ...

    def go_on(
        self, told: Told, messages: Sequence[Message], new: int, tools: Sequence[ToolSpec], check: CheckText
    ) -> Rendered | None:
        """What follows a turn's tokens in a conversation, whose messages from `new` on came after the turn's.

        None where they would be shown otherwise by now.
        """
        ...

    def read(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[ToolSpec],
        stopped: bool,
        prompt: str,
        prompt_token_ids: Sequence[int],
        call_id: str,
    ) -> Parsed:
        """What was sampled after a prompt, as a message."""
        ...

    def parse(
        self,
        text: str,
        *,
        tools: Sequence[ToolSpec],
        stopped: bool,
        prompt: str,
        prompt_token_ids: Sequence[int],
        call_id: str,
    ) -> Parsed:
        """The same of a text."""
        ...

    def draft(self, prompt: str, *, tools: bool, stops: Sequence[str]) -> Draft:
        """An answer to a prompt while it is sampled."""
        ...
