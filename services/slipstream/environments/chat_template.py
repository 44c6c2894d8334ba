"""A model's chat template: from messages to text, and which stretches of it the assistant wrote. Imports no torch.

Templates are Jinja in `tokenizer_config.json` or `chat_template.jinja`, rendered in a sandbox with what transformers
gives them. What the assistant wrote is told in one of two ways:

* The template says so itself, with transformers' `{% generation %} ... {% endgeneration %}`.
* Else an assistant's turn is what rendering up to it, as a prompt, lacks of rendering up to and with it. It ends with
  the last special token in there: what follows (ChatML's newline) is the template's.

Stretches are tokenized each by itself, as an engine sees them: a prompt, then what is drawn token by token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.common.config import ConfigError
from slipstream.environments.base import Turns
from slipstream.environments.tokenizer import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Around what a template's own tags mark: code points that Unicode gives to no text."""

Message = Mapping[str, Any]


class Unrenderable(ValueError):
    """A conversation that the template cannot show as it is; begins with the field."""


@dataclass(frozen=True)
class Stretch:
    """A piece of a rendered conversation."""

    text: str
    by_assistant: bool


class ChatTemplate:
    """One model's template."""

    def __init__(self, source: str, special_tokens: Sequence[str], variables: Mapping[str, str]) -> None:
        """`special_tokens`: texts that the tokenizer turns into tokens of their own meaning. `variables`: `bos_token`
        and the like."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda format: datetime.now().astimezone().strftime(format)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the chat template cannot be read: {error}") from None
        self._marks = "endgeneration" in source
        self.special_tokens = tuple(special_tokens)
        self._variables = dict(variables)

    @classmethod
    def load(cls, model_dir: Path, file: Path | None = None) -> ChatTemplate:
        """That of a model directory, or another one in `file`. Raises `ConfigError`."""
        config_file = model_dir / TOKENIZER_CONFIG_FILE
        config = _read_json(config_file) if config_file.exists() else {}
        source = config.get("chat_template")
        for path in (model_dir / TEMPLATE_FILE, file):
            if path is not None and (path is file or path.is_file()):
                source = _read(path)
        if not isinstance(source, str):
            raise ConfigError(
                f"{model_dir} has no chat template: no {TEMPLATE_FILE}, and none in {TOKENIZER_CONFIG_FILE}"
            )
        added = _read_json(model_dir / TOKENIZER_FILE).get("added_tokens", [])
        special = [token["content"] for token in added if token.get("special")]
        named = {name: value for name, value in config.items() if name.endswith("_token") and name != "add_bos_token"}
        variables = {name: value["content"] if isinstance(value, dict) else value for name, value in named.items()}
        return cls(source, special, {name: value for name, value in variables.items() if isinstance(value, str)})

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """What the assistant is to go on from."""
        return self._render(messages, tools, prompt=True).replace(_BEGIN, "").replace(_END, "")

    def stretches(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, turns: Turns = "all"
    ) -> list[Stretch]:
        """A conversation up to the end of its last assistant's turn. Of the assistant's turns all, or the last, are
        marked as such. Raises `Unrenderable`."""
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
        if last is None:
            raise Unrenderable("messages: no assistant's turn, so there is nothing to learn")
        messages = messages[: last + 1]
        self._check(messages, tools)
        whole, found = self._marked(messages, tools) if self._marks else self._compared(messages, tools, turns)
        if turns == "last":
            found = found[-1:]
        stretches: list[Stretch] = []
        at = 0
        for start, end in found:
            stretches += [Stretch(whole[at:start], False), Stretch(whole[start:end], True)]
            at = end
        return [stretch for stretch in stretches if stretch.text]

    def _marked(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        """Text and spans by the template's own tags."""
        pieces = self._render(messages, tools).split(_BEGIN)
        text, spans = pieces[0], []
        for piece in pieces[1:]:
            inside, _, outside = piece.partition(_END)
            if inside:
                spans.append((len(text), len(text) + len(inside)))
            text += inside + outside
        if not spans:
            raise Unrenderable("messages: the chat template marks nothing as the assistant's")
        return text, spans

    def _compared(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, turns: Turns
    ) -> tuple[str, list[tuple[int, int]]]:
        """Text and spans by rendering up to each turn."""
        whole, spans = self._render(messages, tools), []
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or (turns == "last" and index < len(messages) - 1):
                continue
            before = self._render(messages[:index], tools, prompt=True)
            after = self._render(messages[: index + 1], tools)
            if not (after.startswith(before) and whole.startswith(after)):
                hint = "; train on the last turn only" if turns == "all" and index < len(messages) - 1 else ""
                raise Unrenderable(
                    f"messages.{index}: the chat template shows this turn otherwise than it prompts for it, or once "
                    f"others follow{hint}"
                )
            spans.append((len(before), len(before) + self._turn_length(after[len(before) :], index)))
        return whole, spans

    def _turn_length(self, text: str, index: int) -> int:
        """Up to the end of the last special token."""
        ends = [at + len(token) for token in self.special_tokens if (at := text.rfind(token)) >= 0]
        if not ends:
            raise Unrenderable(f"messages.{index}: the chat template ends this turn with no special token")
        return max(ends)

    def _check(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> None:
        """Refuse what would pass for the template's own words, and what the template would leave out in silence."""
        given = {"messages": messages, "tools": tools or ()}
        for where, said in ((f"{name}.{i}", part) for name, parts in given.items() for i, part in enumerate(parts)):
            for text in _texts(said):
                for token in (*self.special_tokens, _BEGIN, _END):
                    if token in text:
                        raise Unrenderable(f"{where}: holds {token!r}, which means something to the model")
        whole = self._render(messages, tools)
        if tools and whole == self._render(messages, None):
            raise Unrenderable("tools: the chat template leaves them out")
        for index, message in enumerate(messages):
            if message.get("tool_calls"):
                without = {key: value for key, value in message.items() if key != "tool_calls"}
                if whole == self._render([*messages[:index], without, *messages[index + 1 :]], tools):
                    raise Unrenderable(f"messages.{index}.tool_calls: the chat template leaves them out")

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool = False) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=prompt, **self._variables
            )
        except RecursionError:
            raise Unrenderable("messages: too deep for the chat template") from None
        except (TemplateError, TypeError, ValueError) as error:  # templates add up what is there, of whatever type
            raise Unrenderable(f"messages: the chat template refuses them: {error}") from None


class _Generation(Extension):
    """`{% generation %}`: what is inside is the assistant's."""

    tags = {"generation"}  # noqa: RUF012 jinja2's own way

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _texts(value: Any) -> Iterator[str]:
    """All texts in it, keys too, as they are: JSON would hide a token that has a quote or a backslash."""
    left = [value]
    while left:
        at = left.pop()
        if isinstance(at, str):
            yield at
        elif isinstance(at, Mapping):
            left += [*at.keys(), *at.values()]
        elif isinstance(at, list | tuple):
            left += at


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """As transformers': jinja2's own escapes HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} has no {path.name}") from None
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
