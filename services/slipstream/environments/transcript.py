"""The conversations of one rollout as tokens, each exactly as it was sampled.

A request names the whole conversation that the model is to go on from. Where an earlier turn of the rollout is its
beginning, its tokens are too, as they were sampled: only what came after is rendered and encoded. A conversation that
goes on from the newest turn of a sample extends that sample; any other begins another one:

| why a sample begins | |
|---|---|
| `first` | there was none |
| `branch` | it goes on from an earlier turn than the newest, whose tokens it shares |
| `template` | the chat template shows earlier turns otherwise by now: thinking that it leaves out, say |
| `history` | no turn of the rollout is its beginning: a sub-agent, a history cut short or edited |

What a sample shares with an earlier one is trained only there, as `Rollout` trains what was sampled for itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from slipstream.common.errors import ContextTooLong
from slipstream.environments.messages import Message, ToolSpec, said_the_same
from slipstream.environments.renderer import Renderer, Told
from slipstream.environments.tool_calls import Parsed

Begun = Literal["", "first", "branch", "template", "history"]
"""Why a sample begins; empty where one goes on."""


@dataclass(frozen=True)
class Prompt:
    """What the next turn is sampled from."""

    sample: int
    """Which of the rollout's samples, from 0. One beyond the last begins."""

    base_sample: int
    base_token_count: int
    """So many first tokens of that sample are the beginning of this prompt."""

    new_token_ids: list[int]
    """What follows them."""

    begun: Begun

    @property
    def token_count(self) -> int:
        return self.base_token_count + len(self.new_token_ids)


@dataclass
class _Turn:
    """A turn of the model's: what it was shown, and where its tokens end."""

    message_count: int
    """Messages of the sample before it."""

    shown: str
    """Its prompt as text."""

    start: int
    """Tokens of the prompt."""

    tools: tuple[ToolSpec, ...]
    end: int = 0
    """Tokens of the sample up to its end; 0 while it is sampled."""
    ended: bool = True
    """It ended with its end token."""


@dataclass
class _Sample:
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    """All so far, as they were asked and sampled."""
    messages: list[Message] = field(default_factory=list[Message])
    turns: list[_Turn] = field(default_factory=list[_Turn])
    """Its own: those of a branch's beginning are the other sample's."""
    closed: bool = False
    """A turn of it failed: its tokens may have some that nobody was shown."""


class Transcript:
    """One rollout's samples. `ask` before a turn, `answer` after it; turns of different samples may overlap."""

    def __init__(self, renderer: Renderer, context_tokens: int) -> None:
        self._renderer = renderer
        self._context_tokens = context_tokens
        self._samples: list[_Sample] = []
        self.text_bytes = 0
        """Of all prompts as text, which are kept, and of what was asked that they do not show."""

    @property
    def sample_count(self) -> int:
        return len(self._samples)

    def ask(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Prompt:
        """The prompt of a turn after these messages.

        Raises `Unrenderable` where the template refuses them and `ContextTooLong` where they do not fit; nothing has
        changed then.
        """
        tools = tuple(tools)
        found = self._known(messages)
        begun: Begun = "history" if self._samples else "first"
        if found is not None:
            number, turn = found
            known = self._samples[number]
            new = turn.message_count + 1
            messages = [*known.messages[:new], *messages[new:]]
            check = partial(self._check_text, turn.end)
            rendered = self._renderer.go_on(_told(known, turn), messages, new, tools, check)
            if rendered is not None:
                newest = turn is known.turns[-1] and not known.closed
                prompt = Prompt(
                    sample=number if newest else len(self._samples),
                    base_sample=number,
                    base_token_count=turn.end,
                    new_token_ids=rendered.token_ids,
                    begun="" if newest else "branch",
                )
                return self._begin(prompt, messages, rendered.text, tools)
            begun = "template"
        rendered = self._renderer.begin(messages, tools, partial(self._check_text, 0))
        prompt = Prompt(len(self._samples), 0, 0, rendered.token_ids, begun)
        return self._begin(prompt, messages, rendered.text, tools)

    def ask_text(self, text: str) -> Prompt:
        """The prompt of a turn after a text that is taken as it is. It begins a sample. Raises `ContextTooLong`."""
        self._check_text(0, text)
        begun: Begun = "history" if self._samples else "first"
        return self._begin(Prompt(len(self._samples), 0, 0, self._renderer.codec.encode(text), begun), [], text, ())

    def take_up(self, prompt: Prompt, messages: Sequence[Message], tools: Sequence[ToolSpec], text: str | None) -> None:
        """As `ask` answered it in an earlier process, or `ask_text` where there is a text."""
        base = self._samples[prompt.base_sample] if prompt.base_token_count else None
        turn = next((turn for turn in base.turns if turn.end == prompt.base_token_count), None) if base else None
        if base is not None and turn is None:
            raise ValueError("its beginning is not there")
        if base is not None and turn is not None:
            messages = [*base.messages[: turn.message_count + 1], *messages[turn.message_count + 1 :]]
        tools = tuple(tools)
        shown = self._renderer.show(messages, tools) if text is None else text
        while len(self._samples) < prompt.sample:  # of turns that came to no end there, or do so later
            self._samples.append(_Sample())
        self._begin(prompt, messages, shown, tools)

    def shown(self, sample: int) -> str:
        """The prompt of the last `ask` of a sample as text."""
        return self._samples[sample].turns[-1].shown

    def answer(self, sample: int, token_ids: Sequence[int], *, stopped: bool, shown: str | None = None) -> Parsed:
        """Take what was sampled for the last `ask` of a sample; `stopped`: it drew the end token.

        `shown`: the part of its text that whoever asked was shown, where that is not all.
        """
        known = self._samples[sample]
        turn = known.turns[-1]
        if turn.end:
            raise ValueError("this sample waits for no answer")
        asked = {
            "tools": turn.tools,
            "stopped": stopped,
            "prompt": turn.shown,
            "prompt_token_ids": known.token_ids,
            "call_id": f"call-{sample}-{len(known.turns)}",
        }
        renderer = self._renderer
        parsed = renderer.read(token_ids, **asked) if shown is None else renderer.parse(shown, **asked)
        known.token_ids.extend(token_ids)
        turn.end, turn.ended = len(known.token_ids), stopped
        known.messages.append(parsed.message)
        return parsed

    def give_up(self, sample: int) -> None:
        """Forget the last `ask` of a sample, and its answer, if that had come: its turn failed.

        What goes on from the turn before is a branch.
        """
        known = self._samples[sample]
        if known.turns:
            turn = known.turns.pop()
            if turn.end:
                del known.messages[turn.message_count :]
            self.text_bytes -= text_bytes(turn.shown)
            known.closed = True

    def count_asked(self, sample: int, asked_bytes: int) -> None:
        """Count what was asked in the last `ask` of a sample beyond what its prompt shows: it is kept, too."""
        self.text_bytes += max(0, asked_bytes - text_bytes(self.shown(sample)))

    def take_back(self, prompts: Sequence[Prompt]) -> None:
        """Forget the newest prompts, of which nothing was sampled and nobody knows."""
        for prompt in reversed(prompts):
            self.give_up(prompt.sample)
            if prompt.begun and prompt.sample == len(self._samples) - 1:
                self._samples.pop()

    def room(self, prompt: Prompt) -> int:
        """Tokens that the turn after a prompt may have, at least 1."""
        return self._context_tokens - prompt.token_count

    def messages(self, sample: int) -> list[Message]:
        """The conversation of a sample so far."""
        return list(self._samples[sample].messages)

    def _known(self, messages: Sequence[Message]) -> tuple[int, _Turn] | None:
        """The latest turn whose conversation, itself included, these messages go on from."""
        best: tuple[int, _Turn] | None = None
        for number, sample in enumerate(self._samples):
            same = _same_count(sample.messages, messages)
            for turn in reversed(sample.turns):
                if turn.end and turn.message_count < same:
                    if best is None or turn.message_count > best[1].message_count:
                        best = number, turn
                    break
        return best

    def _begin(self, prompt: Prompt, messages: Sequence[Message], shown: str, tools: tuple[ToolSpec, ...]) -> Prompt:
        self._check(prompt.token_count)
        if prompt.sample == len(self._samples):
            self._samples.append(_Sample())
        sample = self._samples[prompt.sample]
        shared = self._samples[prompt.base_sample].token_ids[: prompt.base_token_count]
        sample.token_ids = shared + array("i", prompt.new_token_ids)
        sample.messages[:] = messages
        sample.turns.append(_Turn(len(messages), shown, prompt.token_count, tools))
        self.text_bytes += text_bytes(shown)
        return prompt

    def _check_text(self, token_count: int, text: str) -> None:
        """A long text takes seconds to encode, which are others' seconds too: what cannot fit is not begun."""
        self._check(token_count + len(text) / self._renderer.codec.longest_token)

    def _check(self, token_count: float) -> None:
        if token_count >= self._context_tokens:
            raise ContextTooLong(
                f"a conversation of {token_count:.0f} tokens leaves no room in {self._context_tokens}",
                name="prompt",
                limit=self._context_tokens,
            )


def _told(sample: _Sample, turn: _Turn) -> Told:
    return Told(
        turn.shown,
        sample.token_ids[: turn.start],
        sample.token_ids[turn.start : turn.end],
        sample.messages[turn.message_count],
        turn.tools,
        turn.ended,
    )


def text_bytes(text: str) -> int:
    """What a text takes as UTF-8."""
    return len(text.encode(errors="surrogatepass"))


def _same_count(known: Sequence[Message], given: Sequence[Message]) -> int:
    """How many first messages are the same."""
    count = 0
    for one, other in zip(known, given, strict=False):
        if one is not other and not said_the_same(one, other):
            break
        count += 1
    return count
