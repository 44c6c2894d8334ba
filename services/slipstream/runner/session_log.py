"""What is on disk of a session group under way: turns as they end, and how members ended.

A turn is kept before whoever asked hears its end. A restarted runner gives its conversations back to the process that
has them, turn by turn, as prompts were built and answers sampled: nothing is rendered to tokens again. Messages that
the turn before had as well are not kept twice.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.api.rollout.v1 import runner_pb2, session_pb2
from slipstream.runner.spool import Spool


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """One answer of a turn."""

    prompt: dict[str, Any]
    """As `ask` answered it."""
    record: runner_pb2.RolloutRecord
    shown: str | None
    """What was shown of its text, where a text ended it."""


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """A turn that ended."""

    index: int
    """Of its member."""
    request: session_pb2.RunTurnRequest
    """What was asked: messages, prompt, and tools alone."""
    answers: list[KeptAnswer]


@dataclass(frozen=True, slots=True)
class KeptEnd:
    """The end of a member."""

    index: int
    reason: str
    """Empty: it was closed with a reward."""
    request: session_pb2.EndSessionRequest


@dataclass(frozen=True, slots=True)
class Gap:
    """A record of a member that cannot be read any more."""

    index: int


@dataclass(slots=True)
class _Before:
    """What the turn before asked, as digests and, while it is read, as messages."""

    digests: list[bytes] = field(default_factory=list[bytes])
    messages: list[session_pb2.ChatMessage] = field(default_factory=list[session_pb2.ChatMessage])
    tools_json: str = ""
    tools_digest: bytes = b""


class SessionLog:
    """Of one attempt at a group."""

    def __init__(self, spool: Spool, name: str) -> None:
        self._spool = spool
        self._name = name
        self._before: dict[int, _Before] = {}

    def keep_turn(self, index: int, request: session_pb2.RunTurnRequest, answers: Sequence[KeptAnswer]) -> None:
        """Keep a turn that has ended."""
        before = self._before.setdefault(index, _Before())
        digests = [_digest(message.SerializeToString(deterministic=True)) for message in request.messages]
        shared = _shared(before.digests, digests)
        tools_digest = _digest(request.tools_json.encode())
        same_tools = bool(request.tools_json) and tools_digest == before.tools_digest
        kept = session_pb2.RunTurnRequest(
            messages=request.messages[shared:],
            prompt=request.prompt,
            tools_json="" if same_tools else request.tools_json,
        )
        parts = [kept.SerializeToString()]
        prompts: list[dict[str, Any]] = []
        for answer in answers:
            prompts.append({**answer.prompt, "token_ids": None, "cut": answer.shown is not None})
            parts.append(array("i", answer.prompt["token_ids"]).tobytes())
            parts.append(answer.record.SerializeToString())
            parts.append((answer.shown or "").encode(errors="surrogatepass"))
        meta = {
            "kind": "session_turn",
            "index": index,
            "shared": shared,
            "same_tools": same_tools,
            "prompts": prompts,
            "sizes": [len(part) for part in parts],
        }
        self._spool.append(self._name, meta, b"".join(parts))
        before.digests, before.tools_digest = digests, tools_digest

    def keep_end(self, index: int, reason: str, request: session_pb2.EndSessionRequest | None = None) -> None:
        """Keep how a member ended."""
        data = (request or session_pb2.EndSessionRequest()).SerializeToString()
        self._spool.append(self._name, {"kind": "session_end", "index": index, "reason": reason}, data)

    async def read_again(self, index: int) -> list[KeptTurn | KeptEnd | Gap]:
        """What was kept of a member so far, by this process and earlier ones."""
        records = await self._spool.session_records(self._name, index)
        return list(SessionLog(self._spool, self._name).read(records))

    def read(self, records: Iterable[tuple[dict[str, Any], bytes | None]]) -> Iterator[KeptTurn | KeptEnd | Gap]:
        """What these say, in the order in which it happened."""
        for meta, data in records:
            index = int(meta["index"])
            if data is None:
                yield Gap(index)
            elif meta["kind"] == "session_end":
                yield KeptEnd(index, meta["reason"], session_pb2.EndSessionRequest.FromString(data))
            else:
                yield self._turn(index, meta, data)

    def _turn(self, index: int, meta: dict[str, Any], data: bytes) -> KeptTurn:
        before = self._before.setdefault(index, _Before())
        parts = _parts(data, meta["sizes"])
        request = session_pb2.RunTurnRequest.FromString(next(parts))
        messages = [*before.messages[: meta["shared"]], *request.messages]
        del request.messages[:]
        request.messages.extend(messages)
        if meta["same_tools"]:
            request.tools_json = before.tools_json
        answers = [
            KeptAnswer(
                {**{k: v for k, v in prompt.items() if k != "cut"}, "token_ids": array("i", next(parts)).tolist()},
                runner_pb2.RolloutRecord.FromString(next(parts)),
                text if (text := next(parts).decode(errors="surrogatepass")) or prompt["cut"] else None,
            )
            for prompt in meta["prompts"]
        ]
        before.messages, before.tools_json = messages, request.tools_json
        before.digests = [_digest(message.SerializeToString(deterministic=True)) for message in messages]
        before.tools_digest = _digest(request.tools_json.encode())
        return KeptTurn(index, request, answers)

    def done_reading(self) -> None:
        """Digests are enough from here on."""
        for before in self._before.values():
            before.messages, before.tools_json = [], ""


def _parts(data: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    at = 0
    for size in sizes:
        yield data[at : at + size]
        at += size


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _shared(before: Sequence[bytes], now: Sequence[bytes]) -> int:
    count = 0
    for one, other in zip(before, now, strict=False):
        if one != other:
            break
        count += 1
    return count
