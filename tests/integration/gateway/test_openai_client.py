"""An unmodified OpenAI client at the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from slipstream.api.rollout.v1 import rollout_pb2, session_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common import tracing
from slipstream.common.errors import (
    ContextTooLong,
    EnvironmentTimeout,
    SamplingBiased,
    SessionBusy,
    SessionEnded,
    SessionLimitReached,
    SlipstreamError,
)
from slipstream.common.timeline import TimelineFile

from .conftest import says

Make = Callable[..., Any]
ASK: Any = [{"role": "user", "content": "hi"}]
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = session_pb2.ToolCall(id="call-0", name="add", arguments_json='{"a": 1}')


async def test_a_chat_is_answered_with_its_usage(make_world: Make) -> None:
    async with make_world() as world, world.client() as client:
        answer = await client.chat.completions.create(model="gpt-4o", messages=ASK, max_completion_tokens=9, seed=3)
        assert answer.choices[0].message.content == "hello"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.model == "my-run"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (11, 1, 12)
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 4
        (turn,) = world.runner.turns
        assert (turn.session_id, turn.max_new_tokens, turn.seed, turn.stream) == ("session-a-0", 9, 3, False)
        assert not turn.HasField("temperature"), "what was not said is the session's own"


def test_an_answer_has_no_place_for_expert_routes() -> None:
    known: set[str] = set()
    messages: list[Any] = [session_pb2.RunTurnResponse.DESCRIPTOR]
    while messages:
        message = messages.pop()
        known.add(message.full_name)
        for field in message.fields:
            assert not any(word in field.name for word in ("route", "expert", "rows")), field.full_name
            if field.message_type is not None and field.message_type.full_name not in known:
                messages.append(field.message_type)
    assert {"slipstream.api.rollout.v1.TokenPiece", "slipstream.api.types.v1.VersionSpan"} <= known


async def test_a_stream_brings_the_same_text_piece_by_piece(make_world: Make) -> None:
    async with make_world() as world, world.client() as client:
        world.runner.script = says("he", "ll", "o")
        stream = await client.chat.completions.create(
            model="m", messages=ASK, stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        chunks = [chunk async for chunk in stream]
        assert [c.choices[0].delta.content for c in chunks if c.choices] == ["", "he", "ll", "o", None]
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 3
        assert chunks[1].choices[0].logprobs is not None
        content = chunks[1].choices[0].logprobs.content
        assert content is not None
        assert (content[0].token, content[0].logprob) == ("he", -0.5)
        assert world.runner.turns[0].stream


async def test_the_blocking_client_works_as_well(make_world: Make) -> None:
    async with make_world() as world:

        def ask() -> str | None:
            with openai.OpenAI(base_url=world.base_url, api_key="mine", max_retries=0) as client:
                stream = client.chat.completions.create(model="m", messages=ASK, stream=True)
                return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        assert await asyncio.to_thread(ask) == "hello"


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_reach_the_runner_and_their_calls_the_client(make_world: Make, stream: bool) -> None:
    async with make_world() as world, world.client() as client:
        world.runner.script = says("let me see", tool_calls=(CALL,))
        if stream:
            async with client.chat.completions.stream(model="m", messages=ASK, tools=[ADD]) as events:
                answer = await events.get_final_completion()
        else:
            answer = await client.chat.completions.create(model="m", messages=ASK, tools=[ADD])
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        assert choice.message.content == "let me see"
        (call,) = choice.message.tool_calls
        assert (call.id, call.function.name, call.function.arguments) == ("call-0", "add", '{"a": 1}')
        assert json.loads(world.runner.turns[0].tools_json)[0]["function"]["name"] == "add"

        said = choice.message.model_dump()
        result = {"role": "tool", "tool_call_id": "call-0", "content": "2"}
        await client.chat.completions.create(model="m", messages=[*ASK, said, result], tools=[ADD])
        assistant, tool = world.runner.turns[1].messages[1:]
        assert assistant.tool_calls[0] == CALL
        assert (tool.role, tool.tool_call_id, tool.content) == ("tool", "call-0", "2")


async def test_several_choices_and_stop_texts(make_world: Make) -> None:
    async with make_world() as world, world.client() as client:
        world.runner.script = says("a", "b", reason=types_pb2.FINISH_REASON_LENGTH)
        answer = await client.chat.completions.create(model="m", messages=ASK, n=3, stop=["\n", "END"])
        assert [(c.index, c.message.content, c.finish_reason) for c in answer.choices] == [
            (index, "ab", "length") for index in range(3)
        ]
        assert list(world.runner.turns[0].stop) == ["\n", "END"]
        assert world.runner.turns[0].choice_count == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_completed(make_world: Make, stream: bool) -> None:
    async with make_world() as world, world.client() as client:
        if stream:
            pieces = await client.completions.create(model="m", prompt="once", stream=True, max_tokens=2)
            text = "".join([piece.choices[0].text async for piece in pieces])
        else:
            answer = await client.completions.create(model="m", prompt="once", max_tokens=2, logprobs=0)
            text = answer.choices[0].text
            assert answer.choices[0].logprobs is not None
            assert answer.choices[0].logprobs.token_logprobs == [-0.5]
        assert text == "hello"
        assert world.runner.turns[0].prompt == "once"
        assert not world.runner.turns[0].messages


async def test_the_model_has_the_name_of_the_run(make_world: Make) -> None:
    async with make_world() as world, world.client() as client:
        assert [model.id async for model in client.models.list()] == ["my-run"]
        assert (await client.models.retrieve("my-run")).owned_by == "slipstream"
        with pytest.raises(openai.NotFoundError, match="my-run"):
            await client.models.retrieve("gpt-4o")


async def test_a_key_opens_its_own_session_alone(make_world: Make) -> None:
    async with make_world() as world:
        for key, session_id in (("mine", "session-a-0"), ("yours", "session-b-0")):
            async with world.client(key) as client:
                await client.chat.completions.create(model="m", messages=ASK)
                assert world.runner.turns[-1].session_id == session_id
        for key in ("neither", "session-a-0", "my-run"):
            async with world.client(key) as client:
                with pytest.raises(openai.AuthenticationError) as refused:
                    await client.chat.completions.create(model="m", messages=ASK)
                assert refused.value.code == "invalid_api_key"
        assert len(world.runner.turns) == 2


async def test_a_request_is_a_span_of_its_sessions_rollout_and_its_turn_lies_below(
    make_world: Make, tmp_path: Path
) -> None:
    path = tmp_path / "timeline" / "gateway.jsonl"
    tracing.use(tracing.Tracer("run", 1.0, TimelineFile(path)))
    try:
        async with make_world() as world, world.client() as client:
            session = world.orchestrator.open("session-a-0", "mine")
            session.sample_index, session.dispatch_version.incarnation = 1, 4
            await client.chat.completions.create(model="m", messages=ASK)
        root = tracing.rollout_trace("train-3", 4, 2, 1)
    finally:
        tracing.use(tracing.Tracer("", 0.0))
    spans = {line["name"]: line for line in map(json.loads, path.read_text().splitlines())}
    assert root is not None
    assert (spans["request"]["trace"], spans["request"]["parent"]) == root
    assert spans["request"]["session_id"] == "session-a-0"
    assert (spans["RunTurn"]["trace"], spans["RunTurn"]["parent"]) == (root.trace_id, spans["request"]["span"])


async def test_a_session_that_has_ended_says_why(make_world: Make) -> None:
    async with make_world() as world, world.client() as client:
        session = world.orchestrator.open("session-a-0", "mine")
        session.state, session.reason = rollout_pb2.SESSION_STATE_ENDED, "AGED_OUT"
        with pytest.raises(openai.APIStatusError, match=r"moved too many steps .*AGED_OUT") as refused:
            await client.chat.completions.create(model="m", messages=ASK)
        assert (refused.value.status_code, refused.value.code) == (410, "session_ended")


async def test_what_is_not_served_is_told_what_is(make_world: Make) -> None:
    async with make_world() as world, world.client() as client:
        with pytest.raises(openai.NotFoundError, match="/v1/responses is not served: there are POST") as refused:
            await client.responses.create(model="m", input="hi")
        assert refused.value.code == "not_found"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextTooLong("too long", name="prompt", limit=9), 400, "context_length_exceeded"),
        (SamplingBiased("other temperature", field="temperature"), 400, "unsupported_value"),
        (SessionBusy("busy", limit=4), 429, "session_busy"),
        (SessionLimitReached("enough", name="max_turns", limit=4), 400, "session_limit_reached"),
        (EnvironmentTimeout("it held its process"), 400, "environment_timeout"),
        (SessionEnded("timed out", session_reason="IDLE_TIMEOUT"), 410, "session_ended"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_runner_refuses_has_a_status_of_its_own(
    make_world: Make, error: SlipstreamError, status: int, code: str, stream: bool
) -> None:
    async def script(request: session_pb2.RunTurnRequest) -> AsyncIterator[session_pb2.RunTurnResponse]:
        raise error
        yield

    async with make_world() as world, world.client() as client:
        world.runner.script = script
        with pytest.raises(openai.APIStatusError) as refused:
            await client.chat.completions.create(model="m", messages=ASK, stream=stream)
        assert (refused.value.status_code, refused.value.code) == (status, code)


async def test_a_stream_that_breaks_off_says_so_in_the_stream(make_world: Make) -> None:
    async def script(request: session_pb2.RunTurnRequest) -> AsyncIterator[session_pb2.RunTurnResponse]:
        yield session_pb2.RunTurnResponse(text="hal")
        raise SessionEnded("too old", session_reason="AGED_OUT")

    async with make_world() as world, world.client() as client:
        world.runner.script = script
        stream = await client.chat.completions.create(model="m", messages=ASK, stream=True)
        with pytest.raises(openai.APIError, match="moved too many steps"):
            _ = [chunk async for chunk in stream]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
        ({"tool_choice": "required", "tools": [ADD]}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"7": 1}}, "logit_bias"),
        ({"n": 99}, "n"),
        ({"extra_body": {"top_k": 3}}, "top_k"),
        ({"extra_body": {"messages": [{"role": "wizard", "content": "x"}]}}, "messages.0.role"),
        ({"extra_body": {"messages": []}}, "messages"),
        ({"extra_body": {"max_tokens": "many"}}, "max_tokens"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(make_world: Make, fields: dict[str, Any], param: str) -> None:
    async with make_world() as world, world.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**{"model": "m", "messages": ASK, **fields})
        assert refused.value.param == param
        assert not world.runner.turns


async def test_a_client_that_goes_aborts_its_turn(make_world: Make) -> None:
    async def script(request: session_pb2.RunTurnRequest) -> AsyncIterator[session_pb2.RunTurnResponse]:
        yield session_pb2.RunTurnResponse(text="for ever")
        await asyncio.Event().wait()

    async with make_world() as world:
        world.runner.script = script
        async with world.client() as client:
            stream = await client.chat.completions.create(model="m", messages=ASK, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
        await world.until_aborted(1)
        async with world.client("yours") as client:
            waiting = asyncio.ensure_future(client.chat.completions.create(model="m", messages=ASK))
            async with asyncio.timeout(60):
                while len(world.runner.turns) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            waiting.cancel()
        await world.until_aborted(2)
