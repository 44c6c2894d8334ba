"""A session's conversation, in whichever process has texts now.

That process may die, of no fault of any session: the next one is told the conversation's turns again, from the spool,
as they were sampled, before anything is asked of it. A turn that was under way is not among them: whoever asked is told
to repeat it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import structlog

from slipstream.api.rollout.v1 import runner_pb2, session_pb2
from slipstream.common.errors import EnvironmentFailed, EnvironmentTimeout, SessionEnded, SlipstreamError, Unreachable
from slipstream.runner import telemetry
from slipstream.runner.envclient import EnvironmentWorker
from slipstream.runner.rollout import STOP
from slipstream.runner.session_log import KeptAnswer, KeptTurn, SessionLog

log = structlog.get_logger()

PROMPT_FIELDS = ("sample", "base_sample", "base_token_count", "new_token_ids", "begun")
GONE = "the process that has the session's texts was replaced: repeat the turn"


class UnderWay(Protocol):
    """A turn, as far as it matters here."""

    epoch: int
    """Of the process that it was asked of; 0 before."""
    task: asyncio.Task[None] | None

    def end(self, error: SlipstreamError) -> None: ...


class SessionMemory:
    """Of one session."""

    def __init__(
        self,
        session_id: str,
        index: int,
        texts: EnvironmentWorker,
        session_log: SessionLog,
        turns: Callable[[], Iterable[UnderWay]],
        turn_count: Callable[[], int],
        lost: Callable[[], None],
    ) -> None:
        """`turns`: those under way. `turn_count`: those that have ended. `lost`: the conversation cannot be told."""
        self._lost = lost
        self._session_id = session_id
        self._index = index
        self._texts = texts
        self._log = session_log
        self._turns = turns
        self._turn_count = turn_count
        self._lock = asyncio.Lock()
        self.epoch = 0
        """Of the process that knows the conversation; 0 where none has been told of it."""

    async def ready(self) -> int:
        """The process that knows all of the conversation, by its epoch.

        Raises `Unreachable` where it dies meanwhile, and `SessionEnded` where the turns are not all there.
        """
        async with self._lock:
            epoch = await self._texts.up()
            if epoch != self.epoch:
                await self._end_others(epoch)
                try:
                    if self._turn_count():
                        await self._tell_again(epoch)
                except EnvironmentFailed as error:
                    log.warning("session_not_told_again", session_id=self._session_id, detail=error.message)
                    self._lost()
                    raise SessionEnded("the session's turns cannot be read", session_reason="TURNS_LOST") from error
                self.epoch = epoch
            return epoch

    async def call(self, epoch: int, call: str, **fields: Any) -> dict[str, Any]:
        """One call to the process of an epoch; see `session_texts.py`.

        Raises `Unreachable` where that is gone, but `EnvironmentTimeout` where it is by this very call: who repeated it
        would end the next one, and what all sessions have there.
        """
        if not self._texts.serves(epoch):
            raise Unreachable(GONE)
        try:
            return await self._texts.session(self._session_id, call, **fields)
        except EnvironmentFailed as error:
            if self._texts.serves(epoch) or isinstance(error, EnvironmentTimeout):
                raise
            raise Unreachable(GONE) from error

    def tell(self, epoch: int, call: str, **fields: Any) -> None:
        """The same without an answer; nothing where that process is gone, and with it what this is about."""
        if self._texts.serves(epoch):
            self._texts.tell_session(self._session_id, call, **fields)

    async def take_up(self, epoch: int, turn: KeptTurn) -> None:
        """Tell a process a turn that ended earlier."""
        await self.call(
            epoch,
            "take_up",
            messages=[as_json(message) for message in turn.request.messages],
            prompt=None if turn.request.messages else turn.request.prompt,
            tools_json=turn.request.tools_json,
            answers=[_told(answer) for answer in turn.answers],
        )

    async def _end_others(self, epoch: int) -> None:
        """What was asked of an earlier process comes to no end, and must leave nothing before its like is told."""
        others = [turn for turn in self._turns() if turn.epoch not in (0, epoch)]
        tasks = [turn.task for turn in others if turn.task is not None]
        for turn in others:
            turn.end(Unreachable(GONE))
        if tasks:
            await asyncio.wait(tasks)

    async def _tell_again(self, epoch: int) -> None:
        kept = await self._log.read_again(self._index)
        turns = [each for each in kept if isinstance(each, KeptTurn)]
        if len(turns) != self._turn_count():
            raise EnvironmentFailed("the session's turns are not all on disk", environment="session")
        await self.call(epoch, "close")  # whoever told it last may have been given up halfway
        for turn in turns:
            await self.take_up(epoch, turn)
        telemetry.turns_told_again.inc(len(turns))
        log.info("session_told_again", session_id=self._session_id, turn_count=len(turns))


def _told(answer: KeptAnswer) -> Mapping[str, Any]:
    prompt = {**answer.prompt, "new_token_ids": answer.prompt["token_ids"]}
    record: runner_pb2.RolloutRecord = answer.record
    return {
        "prompt": {name: prompt[name] for name in PROMPT_FIELDS},
        "token_ids": list(record.answer.token_ids),
        "stopped": record.finish_reason == STOP and answer.shown is None,
        "shown": answer.shown,
    }


def as_json(message: session_pb2.ChatMessage) -> dict[str, Any]:
    """A message in OpenAI's form."""
    said: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        said["tool_call_id"] = message.tool_call_id
    if message.name:
        said["name"] = message.name
    return said
