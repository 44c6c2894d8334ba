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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from slipstream.common.errors import ContextTooLong
from slipstream.environments.chat import Chat
from slipstream.environments.messages import Message, ToolSpec, said_the_same
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
    """Its prompt, as the template renders it."""

    tools: tuple[ToolSpec, ...]
    end: int = 0
    """Tokens of the sample up to its end; 0 while it is sampled."""
    ended: bool = True
    """It ended with its end token."""


@dataclass
class _Sample:
    token_count: int = 0
    messages: list[Message] = field(default_factory=list[Message])
    turns: list[_Turn] = field(default_factory=list[_Turn])
    """Its own: those of a branch's beginning are the other sample's."""
    closed: bool = False
    """A turn of it failed: its tokens may have some that nobody was shown."""


class Transcript:
    """One rollout's samples. `ask` before a turn, `answer` after it; turns of different samples may overlap."""

    def __init__(self, chat: Chat, context_tokens: int) -> None:
        self._chat = chat
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
            messages = [*known.messages[: turn.message_count + 1], *messages[turn.message_count + 1 :]]
        shown = self._chat.show(messages, tools)
        if found is not None:
            number, turn = found
            known = self._samples[number]
            rest = self._rest(known, turn, shown)
            if rest is not None:
                self._check_text(turn.end, rest)
                new = self._chat.encode_after_end(rest) if turn.ended else self._chat.encode(self._chat.end_text + rest)
                newest = turn is known.turns[-1] and not known.closed
                prompt = Prompt(
                    sample=number if newest else len(self._samples),
                    base_sample=number,
                    base_token_count=turn.end,
                    new_token_ids=new,
                    begun="" if newest else "branch",
                )
                return self._begin(prompt, messages, shown, tools)
            begun = "template"
        self._check_text(0, shown)
        prompt = Prompt(len(self._samples), 0, 0, self._chat.encode(shown), begun)
        return self._begin(prompt, messages, shown, tools)

    def ask_text(self, text: str) -> Prompt:
        """The prompt of a turn after a text that is taken as it is. It begins a sample. Raises `ContextTooLong`."""
        self._check_text(0, text)
        begun: Begun = "history" if self._samples else "first"
        return self._begin(Prompt(len(self._samples), 0, 0, self._chat.encode(text), begun), [], text, ())

    def take_up(self, prompt: Prompt, messages: Sequence[Message], tools: Sequence[ToolSpec], text: str | None) -> None:
        """As `ask` answered it in an earlier process, or `ask_text` where there is a text."""
        base = self._samples[prompt.base_sample] if prompt.base_token_count else None
        turn = next((turn for turn in base.turns if turn.end == prompt.base_token_count), None) if base else None
        if base is not None and turn is None:
            raise ValueError("its beginning is not there")
        if base is not None and turn is not None:
            messages = [*base.messages[: turn.message_count + 1], *messages[turn.message_count + 1 :]]
        tools = tuple(tools)
        shown = self._chat.show(messages, tools) if text is None else text
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
        names, call_id = [tool.name for tool in turn.tools], f"call-{sample}-{len(known.turns)}"
        if shown is None:
            parsed = self._chat.read(token_ids, tools=names, stopped=stopped, prompt=turn.shown, call_id=call_id)
        else:
            parsed = self._chat.parse(shown, tools=names, stopped=stopped, prompt=turn.shown, call_id=call_id)
        known.token_count += len(token_ids)
        turn.end, turn.ended = known.token_count, stopped
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

    def _rest(self, sample: _Sample, turn: _Turn, shown: str) -> str | None:
        """What `shown` has after the end of a turn; None where it shows the turn, or what was before, otherwise.

        The same message in other words of the template's, such as a call's JSON with other spaces, is the same.
        """
        if not shown.startswith(turn.shown):
            return None
        found = self._chat.after_turn(shown, len(turn.shown))
        if found is None:
            return None
        text, rest = found
        names = [tool.name for tool in turn.tools]
        parsed = self._chat.parse(text, tools=names, stopped=True, prompt=turn.shown).message
        said = sample.messages[turn.message_count]
        same = said_the_same(parsed, said) and bool(parsed.reasoning) == bool(said.reasoning)
        return rest if same else None

    def _begin(self, prompt: Prompt, messages: Sequence[Message], shown: str, tools: tuple[ToolSpec, ...]) -> Prompt:
        self._check(prompt.token_count)
        if prompt.sample == len(self._samples):
            self._samples.append(_Sample())
        sample = self._samples[prompt.sample]
        sample.token_count = prompt.token_count
        sample.messages[:] = messages
        sample.turns.append(_Turn(len(messages), shown, tools))
        self.text_bytes += text_bytes(shown)
        return prompt

    def _check_text(self, token_count: int, text: str) -> None:
        """A long text takes seconds to encode, which are others' seconds too: what cannot fit is not begun."""
        self._check(token_count + len(text) / self._chat.codec.longest_token)

    def _check(self, token_count: float) -> None:
        if token_count >= self._context_tokens:
            raise ContextTooLong(
                f"a conversation of {token_count:.0f} tokens leaves no room in {self._context_tokens}",
                name="prompt",
                limit=self._context_tokens,
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
