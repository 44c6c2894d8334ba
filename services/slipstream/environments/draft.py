"""An answer as it is sampled: which of its text may be shown already, and whether a text that ends it has come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers.decoders import DecodeStream

from slipstream.environments.tokenizer import TextCodec
from slipstream.environments.tool_calls import THINK, THOUGHT

CALL = "<tool_call>"


class Draft:
    """One answer. What a message does not have in its content, reasoning and calls, is never shown."""

    def __init__(
        self,
        codec: TextCodec,
        *,
        tools: bool,
        thinking: bool,
        stops: Sequence[str],
        end_ids: Sequence[int] | None = None,
    ) -> None:
        """`thinking`: its prompt ended within the reasoning. `stops`: texts at which it ends. `end_ids`: tokens that
        end it, if not those of the tokenizer."""
        self._codec = codec
        self._end_ids = codec.stop_token_ids if end_ids is None else end_ids
        self._stream = DecodeStream(skip_special_tokens=False)
        self._held = [*stops, *([CALL] if tools else [])]
        self._tools = tools
        self._thinking = thinking
        self._stops = list(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._shown = 0
        self.text = ""
        """All of it, up to the text that ended it."""

    def hear(self, token_ids: Iterable[int]) -> tuple[str, int | None]:
        """Take tokens; returns text that may be shown now, and at how many of them the answer ended, if it did."""
        for count, token_id in enumerate(token_ids, start=1):
            if token_id in self._end_ids:
                continue
            before = len(self.text)
            self.text += self._codec.step(self._stream, token_id)
            at = self._stopped_at(max(0, before - self._longest))
            if at is not None:
                self.text = self.text[:at]
                return self._news(self._content()), count
        content = self._content()
        return self._news(content[: len(content) - self._unclear(content)].rstrip()), None

    def rest(self, content: str) -> str:
        """What of the message's content was not shown yet."""
        return content[self._shown :]

    def _stopped_at(self, start: int) -> int | None:
        found = [at for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        return min(found, default=None)

    def _content(self) -> str:
        """As far as it is known that it is content."""
        text = self.text
        head = text.lstrip()
        if self._thinking or head.startswith(THINK):
            _, _, text = text.partition(THOUGHT)
        elif THINK.startswith(head):
            return ""
        if self._tools:
            text = text.partition(CALL)[0]
        return text.strip()

    def _unclear(self, content: str) -> int:
        """Characters at its end that may be the beginning of what is not shown."""
        longest = max((len(text) for text in self._held), default=1) - 1
        for count in range(min(longest, len(content)), 0, -1):
            if any(text.startswith(content[-count:]) for text in self._held):
                return count
        return 0

    def _news(self, content: str) -> str:
        news = content[self._shown :]
        self._shown = max(self._shown, len(content))
        return news
