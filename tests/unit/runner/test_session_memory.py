"""A session's conversation, told again to the process that took a dead one's place."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from slipstream.api.rollout.v1 import runner_pb2, session_pb2
from slipstream.common.errors import EnvironmentFailed, EnvironmentReplaced, EnvironmentTimeout, Unreachable
from slipstream.environments.chat import Chat, plain_template
from slipstream.environments.tokenizer import TextCodec, build_tokenizer
from slipstream.runner.envclient import EnvironmentWorker
from slipstream.runner.rollout import STOP
from slipstream.runner.session_log import KeptAnswer, KeptTurn, SessionLog
from slipstream.runner.session_memory import SessionMemory, as_json
from slipstream.runner.session_texts import SessionTexts
from slipstream.runner.spool import Spool

CODEC = TextCodec(build_tokenizer())
CHAT = Chat(CODEC, plain_template(CODEC))
CONTEXT_TOKENS = 400
TURNS = 3


class TextsHere(EnvironmentWorker):
    """The process of texts, which is this one. Its answer to the second turn that it is told never comes."""

    def __init__(self) -> None:
        super().__init__([], 60.0, [])
        self.texts = SessionTexts()
        self.holds = asyncio.Event()
        self._told_count = 0

    async def up(self) -> int:
        return 1

    def serves(self, epoch: int) -> bool:
        return epoch == 1

    async def session(self, session_id: str, call: str, **fields: Any) -> dict[str, Any]:
        reply = self.texts.answer({"session": session_id, "call": call, **fields}, CHAT, CONTEXT_TOKENS)
        self._told_count += call == "take_up"
        if call == "take_up" and self._told_count == 2:
            self.holds.set()
            await asyncio.Event().wait()
        return reply


def converse(texts: SessionTexts, kept: SessionLog) -> None:
    """Some turns of one session, each of which is kept."""
    history: list[session_pb2.ChatMessage] = []
    for number in range(TURNS):
        history.append(session_pb2.ChatMessage(role="user", content=f"say {number}"))
        asked = {
            "messages": [as_json(each) for each in history],
            "prompt": None,
            "tools_json": "",
            "stop": [],
            "count": 1,
        }
        limits = {"max_samples": 4, "max_text_bytes": 4096}
        request = {"session": "s", "call": "ask", "turn_count": number, "limits": limits, **asked}
        (prompt,) = texts.answer(request, CHAT, CONTEXT_TOKENS)["prompts"]
        token_ids = [*CODEC.encode(str(number)), CODEC.end_id]
        said = {"sample": 0, "token_ids": token_ids, "stopped": True, "cut": False, "streamed": False}
        answer = texts.answer({"session": "s", "call": "answer", **said}, CHAT, CONTEXT_TOKENS)
        record = runner_pb2.RolloutRecord(finish_reason=STOP)
        record.answer.token_ids.extend(token_ids)
        kept.keep_turn(0, session_pb2.RunTurnRequest(messages=history), [KeptAnswer(prompt, record, None)])
        history.append(session_pb2.ChatMessage(role="assistant", content=answer["text"]))


async def test_a_conversation_that_was_told_halfway_is_told_from_its_beginning(tmp_path: Path) -> None:
    """Who asked first gave up meanwhile: what it had told must not be there twice, nor count twice."""
    spool = Spool(tmp_path, 1 << 20)
    spool.begin("group", runner_pb2.GroupAssignment(group_id="group"))
    kept, earlier, texts = SessionLog(spool, "group"), SessionTexts(), TextsHere()
    converse(earlier, kept)
    memory = SessionMemory("s", 0, texts, kept, lambda: [], lambda: TURNS, lambda: None)
    asking = asyncio.create_task(memory.ready())
    async with asyncio.timeout(60):
        await texts.holds.wait()
    asking.cancel()
    await asyncio.wait([asking])
    assert await memory.ready() == 1
    told, expected = texts.texts._transcripts["s"], earlier._transcripts["s"]
    assert (told.text_bytes, told.messages(0)) == (expected.text_bytes, expected.messages(0))
    spool.close()


async def test_of_a_groups_file_the_turns_of_the_session_alone_are_read(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1 << 20)
    spool.begin("group", runner_pb2.GroupAssignment(group_id="group"))
    kept = SessionLog(spool, "group")
    converse(SessionTexts(), kept)
    kept.keep_turn(1, session_pb2.RunTurnRequest(prompt="other"), [])
    kept.keep_end(0, "IDLE_TIMEOUT")
    assert [len(await spool.session_records("group", index)) for index in (0, 1, 2)] == [TURNS + 1, 1, 0]
    (other,) = await kept.read_again(1)
    assert isinstance(other, KeptTurn)
    assert other.request.prompt == "other"
    spool.close()


class TextsThatEnd(EnvironmentWorker):
    """The process of texts, which ends with an error in each call."""

    def __init__(self, error: EnvironmentFailed) -> None:
        super().__init__([], 60.0, [])
        self._error = error
        self._up.set()

    async def session(self, session_id: str, call: str, **fields: Any) -> dict[str, Any]:
        self._up.clear()
        raise self._error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (EnvironmentTimeout("environment code held its process"), EnvironmentTimeout),
        (EnvironmentReplaced("other code blocked the environment's process"), Unreachable),
        (EnvironmentFailed("the environment worker died"), Unreachable),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else each.message,
)
async def test_who_ended_the_process_is_not_told_to_repeat_that(
    tmp_path: Path, error: EnvironmentFailed, told: type[Exception]
) -> None:
    spool = Spool(tmp_path, 1 << 20)
    memory = SessionMemory("s", 0, TextsThatEnd(error), SessionLog(spool, "group"), lambda: [], lambda: 0, lambda: None)
    with pytest.raises(told):
        await memory.call(await memory.ready(), "ask")
    spool.close()
