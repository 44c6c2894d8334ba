"""From the pieces of a turn to what OpenAI's clients read: one JSON object, or server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from slipstream.api.rollout.v1 import session_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.gateway.requests import ChatRequest, CompletionRequest

UNKNOWN_LOGPROB = -9999.0
"""What OpenAI's service says of a token that it has no number for."""
_REASONS = {types_pb2.FINISH_REASON_STOP: "stop", types_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass
class Choice:
    """One answer as it comes."""

    text: list[str] = field(default_factory=list[str])
    tokens: list[session_pb2.TokenPiece] = field(default_factory=list[session_pb2.TokenPiece])
    tool_calls: list[session_pb2.ToolCall] = field(default_factory=list[session_pb2.ToolCall])
    finish_reason: str | None = None
    completion_token_count: int = 0


class Answer:
    """The answer to one request, of either kind."""

    def __init__(self, asked: ChatRequest | CompletionRequest, model: str) -> None:
        self._chat = isinstance(asked, ChatRequest)
        self._logprobs = bool(asked.logprobs) if self._chat else asked.logprobs is not None
        self._usage = bool(asked.stream_options and asked.stream_options.include_usage)
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self.choices = [Choice() for _ in range(asked.n or 1)]
        self._prompt_token_count = self._cached_token_count = 0

    @property
    def complete(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.finish_reason for choice in self.choices)

    def take(self, piece: session_pb2.RunTurnResponse) -> None:
        """Add a piece."""
        choice = self.choices[piece.choice_index]
        choice.text.append(piece.text)
        choice.tokens += piece.tokens
        choice.tool_calls += piece.tool_calls
        if piece.finish_reason:
            choice.finish_reason = "tool_calls" if choice.tool_calls else _REASONS.get(piece.finish_reason, "stop")
            choice.completion_token_count = piece.completion_token_count
            self._prompt_token_count = piece.prompt_token_count
            self._cached_token_count = max(self._cached_token_count, piece.cached_token_count)

    def whole(self) -> dict[str, Any]:
        """The answer at once."""
        choices = [self._whole(index, choice) for index, choice in enumerate(self.choices)]
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage_of()}

    def begin(self) -> Iterator[bytes]:
        """Events before the first piece."""
        if self._chat:
            for index in range(len(self.choices)):
                yield self._event(index, {"role": "assistant", "content": ""}, None)

    def piece(self, piece: session_pb2.RunTurnResponse) -> Iterator[bytes]:
        """Events of a piece, which was taken."""
        choice = self.choices[piece.choice_index]
        logprobs = self._logprobs_of(piece.tokens) if self._logprobs and piece.tokens else None
        if piece.text or logprobs:
            yield self._event(piece.choice_index, {"content": piece.text}, None, logprobs)
        if piece.tool_calls:
            calls = [{"index": number, **_call(call)} for number, call in enumerate(piece.tool_calls)]
            yield self._event(piece.choice_index, {"tool_calls": calls}, None)
        if piece.finish_reason:
            yield self._event(piece.choice_index, {}, choice.finish_reason)

    def end(self) -> Iterator[bytes]:
        """Events after the last piece."""
        if self._usage:
            yield event({**self._head, "object": self._chunk, "choices": [], "usage": self._usage_of()})
        yield b"data: [DONE]\n\n"

    @property
    def _chunk(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        said: dict[str, Any] = {"text": text}
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if choice.tool_calls:
                message["content"] = text or None
                message["tool_calls"] = [_call(call) for call in choice.tool_calls]
            said = {"message": message}
        logprobs = self._logprobs_of(choice.tokens) if self._logprobs else None
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _event(self, index: int, delta: dict[str, Any], finish_reason: str | None, logprobs: Any = None) -> bytes:
        said = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self._usage else {}
        return event({**self._head, "object": self._chunk, "choices": [choice], **usage})

    def _logprobs_of(self, tokens: Sequence[session_pb2.TokenPiece]) -> dict[str, Any]:
        known = [(t.text, max(t.logprob, UNKNOWN_LOGPROB) if t.logprob <= 0 else UNKNOWN_LOGPROB) for t in tokens]
        if not self._chat:
            return {
                "tokens": [text for text, _ in known],
                "token_logprobs": [logprob for _, logprob in known],
                "top_logprobs": None,
                "text_offset": [],
            }
        content = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in known
        ]
        return {"content": content, "refusal": None}

    def _usage_of(self) -> dict[str, Any]:
        completion = sum(choice.completion_token_count for choice in self.choices)
        return {
            "prompt_tokens": self._prompt_token_count,
            "completion_tokens": completion,
            "total_tokens": self._prompt_token_count + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached_token_count},
        }


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _call(call: session_pb2.ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
