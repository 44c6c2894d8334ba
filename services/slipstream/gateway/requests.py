"""What a client may ask for, and how it becomes a turn. Unknown fields are refused, by name.

Fields that change nothing about an answer are taken and mean nothing here: `user`, `metadata`, `store`, `service_tier`,
`safety_identifier`, `prompt_cache_key`, `prompt_cache_retention`, `parallel_tool_calls`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from slipstream.api.rollout.v1 import session_pb2
from slipstream.gateway.json_body import read_object
from slipstream.gateway.refusals import Refusal, unsupported

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_PARTS = 4096
"""Of a message's content."""


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _with_one_unknown(cls, given: Any) -> Any:
        """Of fields that there are not, one is told: each would be an error of its own."""
        if not isinstance(given, dict) or len(given) <= len(cls.model_fields):
            return given
        unknown = next(name for name in given if name not in cls.model_fields)
        return {name: value for name, value in given.items() if name in cls.model_fields or name == unknown}


class _Echoed(BaseModel):
    """What clients send back of an answer, with fields of their own making."""

    model_config = ConfigDict(extra="ignore", strict=True)


class FunctionCall(_Echoed):
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCall(_Echoed):
    id: str = Field(max_length=128)
    type: Literal["function"] = "function"
    function: FunctionCall


class Part(_Asked):
    type: Literal["text"]
    text: str


class Message(_Asked):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    name: str | None = Field(default=None, max_length=256)
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=128)] | None = None
    tool_call_id: str | None = Field(default=None, max_length=128)
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None
    reasoning_content: str | None = None

    def to_proto(self) -> session_pb2.ChatMessage:
        content = self.content or ""
        return session_pb2.ChatMessage(
            role="system" if self.role == "developer" else self.role,
            content=content if isinstance(content, str) else "".join(part.text for part in content),
            name=self.name or "",
            tool_call_id=self.tool_call_id or "",
            tool_calls=[
                session_pb2.ToolCall(id=call.id, name=call.function.name, arguments_json=call.function.arguments)
                for call in self.tool_calls or ()
            ],
        )


class Function(_Asked):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Asked):
    type: Literal["function"]
    function: Function


class StreamOptions(_Asked):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Sampled(_Asked):
    """What both kinds of request have."""

    model: str = Field(min_length=1, max_length=256)
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def token_limit(self) -> int | None:
        """Tokens of an answer at most."""
        return self.max_tokens

    def turn(self, session_id: str) -> session_pb2.RunTurnRequest:
        """The part of a turn that both kinds share. Raises `Refusal`."""
        for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
            if getattr(self, name):
                raise unsupported(name, "it would draw other tokens than those of the policy that trains")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOPS or any(not 1 <= len(text) <= 1024 for text in stop):
            raise unsupported("stop", f"at most {MAX_STOPS} texts, each of 1 to 1,024 characters")
        return session_pb2.RunTurnRequest(
            request_id=uuid4().hex,
            session_id=session_id,
            stop=stop,
            choice_count=self.n or 1,
            stream=bool(self.stream),
            max_new_tokens=self.token_limit,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
        )


class ChatRequest(_Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)]
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=512)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None

    @property
    def token_limit(self) -> int | None:
        """Tokens of an answer at most."""
        return self.max_completion_tokens or self.max_tokens

    def turn(self, session_id: str) -> session_pb2.RunTurnRequest:
        """The turn. Raises `Refusal`."""
        if self.top_logprobs:
            raise unsupported("top_logprobs", "the engine gives the log-probability of the sampled token alone")
        if self.response_format not in (None, {"type": "text"}):
            raise unsupported("response_format", "answers are what the policy writes; only text")
        if self.tool_choice not in (None, "auto", "none"):
            raise unsupported("tool_choice", 'the policy chooses: "auto", or "none", which shows it no tools')
        turn = super().turn(session_id)
        turn.logprobs = bool(self.logprobs)
        turn.messages.extend(message.to_proto() for message in self.messages)
        if self.tools and self.tool_choice != "none":
            tools = [tool.model_dump(exclude_none=True) for tool in self.tools]
            turn.tools_json = json.dumps(tools)
        return turn


class CompletionRequest(_Sampled):
    """POST /v1/completions."""

    prompt: str = Field(min_length=1)
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def turn(self, session_id: str) -> session_pb2.RunTurnRequest:
        """The turn. Raises `Refusal`."""
        if self.logprobs:
            raise unsupported("logprobs", "the engine gives the log-probability of the sampled token alone: 0")
        if self.echo:
            raise unsupported("echo", "the prompt is not sampled, so there is nothing to say of it")
        if self.best_of not in (None, 1, self.n or 1):
            raise unsupported("best_of", "all that was sampled is answered: ask for n")
        if self.suffix:
            raise unsupported("suffix", "the policy goes on from a prompt, it fills no gap")
        turn = super().turn(session_id)
        turn.logprobs = self.logprobs is not None
        turn.prompt = self.prompt
        return turn


RequestT = TypeVar("RequestT", bound=BaseModel)


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """A request's body. Raises `Refusal`."""
    given = read_object(body)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]  # few: lists end at their first
        param = ".".join(str(part) for part in first["loc"] if part not in ("str", "list[Part]", "list[str]"))
        unknown = first["type"] == "extra_forbidden"
        message = "there is no such field, or this gateway does not have it" if unknown else first["msg"]
        raise Refusal(
            400, f"{param}: {message}", code="unknown_parameter" if unknown else "invalid_value", param=param
        ) from None
