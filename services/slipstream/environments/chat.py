"""One model's way with conversations: messages to text by its template, text to tokens and back by its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from slipstream.common.config import ConfigError
from slipstream.environments.chat_template import ChatTemplate
from slipstream.environments.draft import Draft
from slipstream.environments.messages import Message, ToolSpec, said_the_same
from slipstream.environments.renderer import CheckText, Rendered, Told
from slipstream.environments.tokenizer import TextCodec
from slipstream.environments.tool_calls import THINK, THOUGHT, Parsed, parse

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>"
    "{% endfor %}"
    "{% if message.role == 'assistant' %}{{ end }}{% endif %}{{ '\\n' }}{% endfor %}"
)
"""For models without a template: each message is a line, and the assistant's ends with the end token."""


class Chat:
    """Renders, encodes and parses: a `Renderer` of any model with a chat template."""

    def __init__(self, codec: TextCodec, template: ChatTemplate) -> None:
        self.codec = codec
        self._template = template
        self._ends = [codec.token_text(token_id) for token_id in codec.stop_token_ids]
        self.end_text = self._ends[0]

    @classmethod
    def load(cls, model_dir: Path, codec: TextCodec) -> Chat:
        """That of a model directory; one without a chat template gets `PLAIN_TEMPLATE`."""
        try:
            template = ChatTemplate.load(model_dir)
        except ConfigError:
            template = plain_template(codec)
        return cls(codec, template)

    def show(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """What the assistant is to go on from, as text. Raises `Unrenderable`.

        Texts of special tokens in what others say are not those tokens: nobody ends the assistant's turn but itself.
        """
        shown = [defused(message, self._template.special_tokens).as_json() for message in messages]
        return self._template.prompt(shown, [tool.as_json() for tool in tools] or None)

    @property
    def stop_token_ids(self) -> list[int]:
        """The tokenizer's."""
        return self.codec.stop_token_ids

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt."""
        return self.codec.encode(text)

    def encode_after_end(self, text: str) -> list[int]:
        """Tokens of text that follows an end token."""
        end_id = self.codec.stop_token_ids[0]
        token_ids = self.codec.encode(self.end_text + text)
        return token_ids[1:] if token_ids[:1] == [end_id] else self.codec.encode(text)

    def after_turn(self, text: str, start: int) -> tuple[str, str] | None:
        """The assistant's turn at `start` of a rendered conversation, and what follows its end token."""
        ends = [(at, end) for end in self._ends if (at := text.find(end, start)) >= 0]
        if not ends:
            return None
        at, end = min(ends)
        return text[start:at], text[at + len(end) :]

    def begin(self, messages: Sequence[Message], tools: Sequence[ToolSpec], check: CheckText) -> Rendered:
        """A whole prompt."""
        shown = self.show(messages, tools)
        check(shown)
        return Rendered(shown, self.encode(shown))

    def go_on(
        self, told: Told, messages: Sequence[Message], new: int, tools: Sequence[ToolSpec], check: CheckText
    ) -> Rendered | None:
        """What the template shows after a turn; None where it shows the turn, or what was before, otherwise.

        The same message in other words of the template's, such as a call's JSON with other spaces, is the same.
        """
        shown = self.show(messages, tools)
        found = self.after_turn(shown, len(told.prompt)) if shown.startswith(told.prompt) else None
        if found is None:
            return None
        text, rest = found
        parsed = self.parse(text, tools=told.tools, stopped=True, prompt=told.prompt).message
        said = told.message
        if not said_the_same(parsed, said) or bool(parsed.reasoning) != bool(said.reasoning):
            return None
        check(rest)
        return Rendered(shown, self.encode_after_end(rest) if told.ended else self.encode(self.end_text + rest))

    def read(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[ToolSpec],
        stopped: bool,
        prompt: str = "",
        prompt_token_ids: Sequence[int] = (),
        call_id: str = "call",
    ) -> Parsed:
        """What was sampled after `prompt`, as a message."""
        ended = bool(token_ids) and token_ids[-1] in self.codec.stop_token_ids
        text = self.codec.decode_all(list(token_ids[:-1] if ended else token_ids))
        return self.parse(text, tools=tools, stopped=stopped, prompt=prompt, call_id=call_id)

    def parse(
        self,
        text: str,
        *,
        tools: Sequence[ToolSpec],
        stopped: bool,
        prompt: str,
        prompt_token_ids: Sequence[int] = (),
        call_id: str = "call",
    ) -> Parsed:
        """Text of the assistant's after `prompt`, as a message."""
        names = [tool.name for tool in tools]
        return parse(text, tools=names, stopped=stopped, thinking=_thinks(prompt), first_id=call_id)

    def draft(self, prompt: str, *, tools: bool, stops: Sequence[str]) -> Draft:
        """An answer to a prompt while it is sampled."""
        return Draft(self.codec, tools=tools, thinking=_thinks(prompt), stops=stops)


def _thinks(prompt: str) -> bool:
    """Whether a prompt ends within the reasoning."""
    return prompt.rfind(THINK) > prompt.rfind(THOUGHT) and prompt.rstrip().endswith(THINK)


def defused(message: Message, tokens: Iterable[str]) -> Message:
    """A message of others with the texts of these tokens spelt otherwise."""
    if message.role == "assistant":
        return message
    content = message.content
    for token in tokens:
        if token in content:
            content = content.replace(token, f"{token[:1]} {token[1:]}")
    return message if content == message.content else replace(message, content=content)


def plain_template(codec: TextCodec) -> ChatTemplate:
    """`PLAIN_TEMPLATE` with the end token of a tokenizer."""
    end = codec.token_text(codec.end_id)
    return ChatTemplate(PLAIN_TEMPLATE, [end], {"end": end})
