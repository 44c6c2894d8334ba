"""Model families' own forms of prompts, reasoning and tool calls, by the library `renderers`.

A chat template says what a conversation looks like as text, and no more. The library knows for each family, as code,
how a conversation goes on from tokens that were sampled, which tokens end a turn, and what a turn says: reasoning, text
and calls, told apart by their special tokens.

What it makes is checked here: a prompt that does not begin with the tokens so far is none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from renderers import create_renderer
from renderers.configs import RendererConfig
from tokenizers import Tokenizer

from slipstream.common.config import ConfigError
from slipstream.environments.chat import defused
from slipstream.environments.chat_template import Unrenderable
from slipstream.environments.config_renderer import FamilyConfig
from slipstream.environments.draft import Draft
from slipstream.environments.json_text import check_json, read_json
from slipstream.environments.messages import Message, ToolCall, ToolSpec
from slipstream.environments.renderer import CheckText, Rendered, Told
from slipstream.environments.tokenizer import TOKENIZER_FILE, TextCodec
from slipstream.environments.tool_calls import MAX_SHOWN_CHARACTERS, Parsed

REFUSED = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RecursionError, TypeError),
    ValueError,
)
"""What the library raises for messages that its family has no form for."""
OWN = ("auto", "default")
"""Names of the library's that are no family: what they do is done by `type = "template"`."""


class FamilyTokenizer:
    """A tokenizer file as the library asks for it."""

    unk_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer, name: str, end_id: int) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = name
        self.eos_token_id = end_id

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return {"input_ids": encoded.ids, "offset_mapping": encoded.offsets}

    def encode(self, text: str, **_: Any) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        token_ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def convert_ids_to_tokens(self, token_ids: Any) -> Any:
        if isinstance(token_ids, int):
            return self._tokenizer.id_to_token(token_ids)
        return [self._tokenizer.id_to_token(token_id) for token_id in token_ids]


class LateDraft(Draft):
    """An answer whose text is shown at its end: what of it is text is known of the whole alone."""

    def _content(self) -> str:
        return ""


class FamilyRenderer:
    """A `Renderer` of one family."""

    def __init__(self, codec: TextCodec, tokenizer: Tokenizer, config: FamilyConfig) -> None:
        """Raises `ConfigError` where the family is not known, or the tokenizer is another's."""
        self.codec = codec
        self._special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        if config.family in OWN:
            raise ConfigError(f'runner.renderer.family: {config.family!r} is none; take type = "template"')
        try:
            asked: Any = TypeAdapter(RendererConfig).validate_python({"name": config.family, **config.options})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"][1:]))
            raise ConfigError(f"runner.renderer: {where and where + ': '}{first['msg']}") from None
        try:
            self._family: Any = create_renderer(FamilyTokenizer(tokenizer, config.family, codec.end_id), asked)
            self.stop_token_ids: list[int] = [int(token_id) for token_id in self._family.get_stop_token_ids()]
        except REFUSED as error:
            raise ConfigError(
                f"runner.renderer.family: the model's tokenizer is not that of {config.family}: {error}"
            ) from None

    @classmethod
    def load(cls, model_dir: Path, codec: TextCodec, config: FamilyConfig) -> FamilyRenderer:
        """For the tokenizer of a model directory."""
        return cls(codec, Tokenizer.from_file(str(model_dir / TOKENIZER_FILE)), config)

    def show(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """What the model is to go on from, as text. Raises `Unrenderable`."""
        return self.codec.decode_all(self._whole(messages, tools))

    def begin(self, messages: Sequence[Message], tools: Sequence[ToolSpec], check: CheckText) -> Rendered:
        """A whole prompt. Raises `Unrenderable`."""
        check("".join(message.content for message in messages))
        token_ids = self._whole(messages, tools)
        return Rendered(self.codec.decode_all(token_ids), token_ids)

    def go_on(
        self, told: Told, messages: Sequence[Message], new: int, tools: Sequence[ToolSpec], check: CheckText
    ) -> Rendered | None:
        """What follows a turn; None where the family shows earlier turns otherwise by now."""
        if list(tools) != list(told.tools):  # they stand at the beginning
            return None
        added = self._shown(messages)[new:]
        check("".join(message["content"] for message in added))
        before = [*told.prompt_token_ids, *told.token_ids]
        try:
            bridged = self._family.bridge_to_next_turn(
                list(told.prompt_token_ids), list(told.token_ids), added, tools=_as_json(tools)
            )
        except REFUSED as error:
            raise Unrenderable(f"messages: {error}") from None
        if bridged is None or list(bridged.token_ids[: len(before)]) != before:
            return None
        token_ids = [int(token_id) for token_id in bridged.token_ids[len(before) :]]
        text = told.prompt + self.codec.decode_all([*told.token_ids, *token_ids])
        return Rendered(text, token_ids)

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
        said = list(token_ids)
        try:
            read = self._family.parse_response(said, tools=_as_json(tools), prompt_ids=list(prompt_token_ids))
        except REFUSED:  # whatever was sampled is a message
            text = self.codec.decode(said).strip()
            return Parsed(Message("assistant", text, stopped=stopped))
        calls: list[ToolCall] = []
        refusals: list[Message] = []
        content = read.content or ""
        names = [tool.name for tool in tools]
        for number, attempt in enumerate(read.tool_calls):
            if not names:
                content += attempt.raw
                continue
            call = _call(attempt, attempt.id or f"{call_id}-{number}", names)
            if isinstance(call, ToolCall):
                calls.append(call)
            else:
                refusals.append(call)
                content += attempt.raw
        message = Message(
            "assistant",
            content.strip(),
            tool_calls=tuple(calls),
            reasoning=(read.reasoning_content or "").strip(),
            stopped=stopped,
        )
        return Parsed(message, tuple(refusals))

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
        return self.read(
            self.codec.encode(text),
            tools=tools,
            stopped=stopped,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            call_id=call_id,
        )

    def draft(self, prompt: str, *, tools: bool, stops: Sequence[str]) -> Draft:
        """An answer to a prompt while it is sampled."""
        return LateDraft(self.codec, tools=tools, thinking=False, stops=stops, end_ids=self.stop_token_ids)

    def _whole(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        try:
            whole = self._family.render_ids(self._shown(messages), tools=_as_json(tools), add_generation_prompt=True)
        except REFUSED as error:
            raise Unrenderable(f"messages: {self.__class__.__name__} refuses them: {error}") from None
        return [int(token_id) for token_id in whole]

    def _shown(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """With the names of the functions that answer: not each client says them, and some families show them."""
        names = {call.id: call.name for message in messages for call in message.tool_calls}
        shown = []
        for message in messages:
            if message.role == "tool" and not message.name and message.tool_call_id in names:
                message = replace(message, name=names[message.tool_call_id])
            shown.append(defused(message, self._special).as_json())
        return shown


def _as_json(tools: Sequence[ToolSpec]) -> list[dict[str, Any]] | None:
    return [tool.as_json() for tool in tools] or None


def _call(attempt: Any, call_id: str, tools: Collection[str]) -> ToolCall | Message:
    """A call, or what the model is told of one that is none."""
    shown = attempt.raw.strip()[:MAX_SHOWN_CHARACTERS]
    arguments: Any = attempt.arguments
    try:
        if isinstance(arguments, str):
            arguments = read_json(arguments)
        else:
            check_json(arguments)
    except ValueError:
        arguments = shown or "no JSON"
    if attempt.name and attempt.name not in tools:
        there = ", ".join(sorted(tools))
        return Message("tool", f"error: there is no tool {attempt.name!r}; there are {there}", tool_call_id=call_id)
    if attempt.status != "ok" or not attempt.name or not isinstance(arguments or {}, dict):
        what = attempt.status if attempt.status != "ok" else "its arguments are no object"
        return Message("tool", f"error: this tool call is malformed ({what}): {shown}", tool_call_id=call_id)
    return ToolCall(attempt.name, dict(arguments or {}), call_id)
