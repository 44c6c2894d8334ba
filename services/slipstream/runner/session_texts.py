"""Sessions in the environment worker: messages to tokens and back. No code of environments runs for them.

| call | answer |
|---|---|
| `ask` | prompts of a turn's answers, or why there are none |
| `hear` | text that may be shown of an answer, and whether a text ended it |
| `answer` | an answer as a message |
| `take_up` | nothing; a turn that ended in an earlier process of the runner is as it was |
| `give_up` | nothing; a turn came to no end |
| `spell` | what tokens decode to, each alone |
| `close` | the conversations of a session, which is forgotten |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from slipstream.common.errors import (
    ContextTooLong,
    EnvironmentFailed,
    InvalidRequest,
    SessionLimitReached,
    SlipstreamError,
)
from slipstream.environments.chat_template import Unrenderable
from slipstream.environments.draft import Draft
from slipstream.environments.json_text import read_json
from slipstream.environments.messages import Message, ToolSpec, message_from_json, tool_from_json
from slipstream.environments.renderer import Renderer
from slipstream.environments.transcript import Prompt, Transcript, text_bytes
from slipstream.runner.session_limits import limit_reached

UNKNOWN = "the process that had this session's conversation died"


class SessionTexts:
    """The conversations of the sessions of one runner."""

    def __init__(self) -> None:
        self._transcripts: dict[str, Transcript] = {}
        self._drafts: dict[tuple[str, int], Draft] = {}

    def answer(self, request: dict[str, Any], renderer: Renderer, context_tokens: int) -> dict[str, Any]:
        """The reply to one call."""
        session: str = request["session"]
        match request["call"]:
            case "ask":
                try:
                    return self._ask(request, renderer, context_tokens)
                except SlipstreamError as error:
                    return {"refused": {"reason": error.reason, "message": error.message, "metadata": error.metadata}}
            case "hear":
                text, cut = self._drafts[session, request["sample"]].hear(request["token_ids"])
                return {"text": text, "cut": cut}
            case "answer":
                return self._answer(request)
            case "take_up":
                return self._take_up(request, renderer, context_tokens)
            case "give_up":
                if session in self._transcripts:
                    self._transcripts[session].give_up(request["sample"])
                self._drafts.pop((session, request["sample"]), None)
                return {}
            case "spell":
                return {"texts": [renderer.codec.decode_all([token_id]) for token_id in request["token_ids"]]}
            case "close":
                transcript = self._transcripts.pop(session, None)
                for key in [key for key in self._drafts if key[0] == session]:
                    del self._drafts[key]
                count = transcript.sample_count if transcript is not None else 0
                said = [transcript.messages(sample) for sample in range(count)] if transcript is not None else []
                return {"conversations": [[message.as_json() for message in messages] for messages in said]}
            case other:
                raise ValueError(f"no such call: {other!r}")

    def _ask(self, request: dict[str, Any], renderer: Renderer, context_tokens: int) -> dict[str, Any]:
        session: str = request["session"]
        transcript = self._transcripts.get(session)
        if transcript is None:
            if request["turn_count"]:
                raise EnvironmentFailed(UNKNOWN, environment="session")
            transcript = self._transcripts[session] = Transcript(renderer, context_tokens)
        asked_bytes = _asked_bytes(request)
        self._check_room(request, transcript, asked_bytes)
        messages, tools = _messages(request["messages"]), _tools(request["tools_json"])
        prompts: list[Prompt] = []
        try:
            for _ in range(request["count"]):
                if request["prompt"] is None:
                    prompts.append(transcript.ask(messages, tools))
                else:
                    prompts.append(transcript.ask_text(request["prompt"]))
                if transcript.sample_count > (limit := request["limits"]["max_samples"]):
                    raise limit_reached("max_samples", limit, "samples")
        except Unrenderable as error:
            transcript.take_back(prompts)
            raise InvalidRequest(str(error), field="messages") from None
        except (ContextTooLong, SessionLimitReached):
            transcript.take_back(prompts)
            raise
        for prompt in prompts:
            transcript.count_asked(prompt.sample, asked_bytes)
            self._drafts[session, prompt.sample] = renderer.draft(
                transcript.shown(prompt.sample), tools=bool(tools), stops=request["stop"]
            )
        return {
            "stop_token_ids": renderer.stop_token_ids,
            "prompts": [
                {
                    "sample": prompt.sample,
                    "base_sample": prompt.base_sample,
                    "base_token_count": prompt.base_token_count,
                    "token_ids": prompt.new_token_ids,
                    "begun": prompt.begun,
                    "max_new_tokens": transcript.room(prompt),
                }
                for prompt in prompts
            ],
        }

    def _check_room(self, request: dict[str, Any], transcript: Transcript, asked_bytes: int) -> None:
        """What a session may take of this process, and of the disk. Each answer keeps its prompt's text."""
        limit: int = request["limits"]["max_text_bytes"]
        if transcript.text_bytes + asked_bytes * request["count"] > limit:
            raise limit_reached("max_text_bytes", limit, "bytes of text")

    def _take_up(self, request: dict[str, Any], renderer: Renderer, context_tokens: int) -> dict[str, Any]:
        session: str = request["session"]
        transcript = self._transcripts.setdefault(session, Transcript(renderer, context_tokens))
        asked_bytes = _asked_bytes(request)
        messages, tools = _messages(request["messages"]), _tools(request["tools_json"])
        for answer in request["answers"]:
            prompt, text = Prompt(**answer["prompt"]), request["prompt"]
            transcript.take_up(prompt, messages, tools, text)
            transcript.count_asked(prompt.sample, asked_bytes)
            transcript.answer(prompt.sample, answer["token_ids"], stopped=answer["stopped"], shown=answer["shown"])
        return {}

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        transcript = self._transcripts[request["session"]]
        draft = self._drafts.pop((request["session"], request["sample"]))
        shown = draft.text if request["cut"] else None
        parsed = transcript.answer(request["sample"], request["token_ids"], stopped=request["stopped"], shown=shown)
        return {
            "shown": shown,
            "text": draft.rest(parsed.message.content) if request["streamed"] else parsed.message.content,
            "tool_calls": [
                {"id": call.id, "name": call.name, "arguments_json": json.dumps(dict(call.arguments))}
                for call in parsed.message.tool_calls
            ],
        }


def _asked_bytes(request: dict[str, Any]) -> int:
    """What a request has as text. Not each chat template shows tools, or calls."""
    calls = (json.dumps(each["tool_calls"]) for each in request["messages"] if "tool_calls" in each)
    texts = (request["prompt"] or "", request["tools_json"], *(each["content"] for each in request["messages"]), *calls)
    return sum(map(text_bytes, texts))


def _messages(given: Sequence[dict[str, Any]]) -> list[Message]:
    found: list[Message] = []
    for number, each in enumerate(given):
        try:
            found.append(message_from_json(each))
        except ValueError as error:
            field = f"messages.{number}.{str(error).partition(':')[0]}"
            raise InvalidRequest(f"messages.{number}.{error}", field=field) from None
    return found


def _tools(tools_json: str) -> list[ToolSpec]:
    if not tools_json:
        return []
    try:
        given = read_json(tools_json)
        if not isinstance(given, list):
            raise ValueError("no list")
        return [tool_from_json(each) for each in given]
    except (ValueError, AttributeError) as error:
        raise InvalidRequest(f"tools: {error}", field="tools") from None
