"""The conversations of one episode: one for each role that the model plays in it, a single one where there are none.

Each has a transcript of its own, so that what one role said is never taken for another's, however alike they are. The
rollout's samples are those of all of them, numbered as they begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.environments.base import Context, Turn
from slipstream.environments.messages import Message, ToolSpec
from slipstream.environments.renderer import Renderer
from slipstream.environments.tool_calls import Parsed
from slipstream.environments.transcript import Transcript


@dataclass
class _Seat:
    """One role's side."""

    transcript: Transcript
    tools: tuple[ToolSpec, ...]
    history: list[Message] = field(default_factory=list[Message])
    """Its present conversation."""
    numbers: list[int] = field(default_factory=list[int])
    """Of its samples in the rollout, by their numbers in its transcript."""
    asked: int = 0
    """Its sample that was asked last."""
    spoke: bool = False


class Seats:
    """Of one episode. `go_on`, `ask` and `answer` follow each other."""

    def __init__(
        self, renderer: Renderer, context_tokens: int, roles: Sequence[str], tools: Sequence[ToolSpec], first: str = ""
    ) -> None:
        """`roles`: what the environment declares, if it does. `first`: whose the first turn is, unless the first's."""
        self._renderer = renderer
        self._context_tokens = context_tokens
        self._tools = tuple(tools)
        self._roles = tuple(roles) or ("",)
        self._seats: dict[str, _Seat] = {}
        self._samples: list[tuple[_Seat, int]] = []
        self.role = first or self._roles[0]
        """Whose turn it is, or was last."""
        self.said = ""
        """The newest words of the model."""
        self._check(self.role)

    @property
    def history(self) -> list[Message]:
        """The conversation of whose turn it is."""
        return self._seat().history

    @property
    def spoken(self) -> list[str]:
        """Roles that had a turn, as the environment orders them."""
        return [role for role in self._roles if role in self._seats and self._seats[role].spoke]

    def go_on(self, said: Sequence[Message] | Context | Turn) -> None:
        """Take what the environment answered. Raises `ValueError` for a role that it has not."""
        match said:
            case Turn():
                self._check(said.role)
                if not said.messages:
                    raise ValueError(f"a turn of {said.role!r} has no messages")
                self.role = said.role
                self.history.extend(said.messages)
            case Context():
                self._check(said.role or self.role)
                self.role = said.role or self.role
                self.history[:] = said.messages
                if said.tools is not None:
                    self._seat().tools = tuple(said.tools)
            case _:
                self.history.extend(said)

    def ask(self) -> tuple[dict[str, Any], int]:
        """The next prompt, as `TurnPrompt` has it but for `max_new_tokens`, and how many tokens there is room for.

        Raises `ContextTooLong`.
        """
        seat = self._seat()
        prompt = seat.transcript.ask(seat.history, seat.tools)
        if prompt.sample == len(seat.numbers):
            seat.numbers.append(len(self._samples))
            self._samples.append((seat, prompt.sample))
        seat.asked = prompt.sample
        asked = {
            "sample": seat.numbers[prompt.sample],
            "base_sample": seat.numbers[prompt.base_sample],
            "base_token_count": prompt.base_token_count,
            "token_ids": prompt.new_token_ids,
            "begun": prompt.begun,
            "role": self.role,
        }
        return asked, seat.transcript.room(prompt)

    def answer(self, token_ids: Sequence[int], *, stopped: bool) -> Parsed:
        """Take what was sampled for the last `ask`."""
        seat = self._seat()
        parsed = seat.transcript.answer(seat.asked, token_ids, stopped=stopped)
        seat.history.append(parsed.message)
        seat.spoke, self.said = True, parsed.message.content
        return parsed

    def shown(self) -> str:
        """The conversation of whose turn it is as text."""
        return self._renderer.show(self.history, self._seat().tools)

    def conversations(self) -> list[list[dict[str, Any]]]:
        """The messages of each sample of the rollout."""
        return [[message.as_json() for message in seat.transcript.messages(n)] for seat, n in self._samples]

    def _seat(self) -> _Seat:
        if self.role not in self._seats:
            self._seats[self.role] = _Seat(Transcript(self._renderer, self._context_tokens), self._tools)
        return self._seats[self.role]

    def _check(self, role: str) -> None:
        if role not in self._roles:
            known = ", ".join(filter(None, self._roles)) or "none"
            raise ValueError(f"the environment has no role {role!r}; its roles: {known}")
