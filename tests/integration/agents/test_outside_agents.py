"""Outside agents with unmodified OpenAI clients, before vLLM: what they are told, and what trains of it."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio

from slipstream.environments.tokenizer import TextCodec
from slipstream.orchestrator.config import SessionsConfig
from slipstream_client import Session, SessionState
from tests.integration.agents.calling import BLOCK_TOKENS, SIZES, build_tokenizer
from tests.integration.agents.history import Turn, turns

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]

CODEC = TextCodec(build_tokenizer(), SIZES.eos_token_id)
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere. " * 16,
        "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
    },
}
BEGIN: list[Any] = [{"role": "user", "content": "look around"}]
CALLS = 3


@pytest_asyncio.fixture(loop_scope="session")
async def stack(start_stack: Any) -> Any:
    """A run whose training is all sessions'."""
    return await start_stack(sessions=SessionsConfig(only=True))


def agent(session: Session, key: str = "") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=key or session.key, max_retries=0, timeout=60)


async def pair(stack: Any) -> list[Session]:
    """Two sessions that are compared."""
    return [await stack.client.open_session(group_key="look", group_size=2, timeout_s=60) for _ in range(2)]


async def work(model: openai.AsyncOpenAI, messages: list[Any]) -> list[Any]:
    """An agent's loop until it has called its tool some times. Returns the conversation, the last answer included."""
    messages = list(messages)
    called = 0
    while True:
        answer = await model.chat.completions.create(model="any", messages=messages, tools=[LOOK], max_tokens=120)
        (choice,) = answer.choices
        messages.append(choice.message.model_dump(exclude_none=True))
        calls = choice.message.tool_calls or []
        assert (choice.finish_reason == "tool_calls") == bool(calls)
        for call in calls:
            assert call.type == "function"
            assert call.function.name == "look"
            called += 1
            found = f"at {json.loads(call.function.arguments)['at']} there is a cab"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
        if called >= CALLS:
            return messages
        if not calls:
            messages.append({"role": "user", "content": "look"})


async def streamed(model: openai.AsyncOpenAI, messages: list[Any], **fields: Any) -> tuple[str, list[Any], list[Any]]:
    """An answer's text, the names and arguments of its calls, and what is said of its tokens."""
    text, calls, tokens = "", [], []
    stream = await model.chat.completions.create(model="any", messages=messages, stream=True, max_tokens=120, **fields)
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                calls.append((call.function.name, json.loads(call.function.arguments or "")))
            tokens += choice.logprobs.content or [] if choice.logprobs else []
    return text, calls, tokens


async def code_of(call: Any) -> tuple[int, str | None]:
    with pytest.raises(openai.APIStatusError) as refused:
        await call
    return refused.value.status_code, refused.value.code


def sampled(stack: Any) -> list[Any]:
    """All answers that vLLM gave, in the order in which they were asked for."""
    asked = [sample_id for request in stack.decoder.decodes for sample_id in request.sample_ids]
    return [stack.decoder.answers[sample_id] for sample_id in asked]


def prefix_of(one: Turn, other: Turn) -> bool:
    return other.prompt[: len(one.prompt) + len(one.said)] == one.prompt + one.said


def was_cut(stack: Any, each: Any) -> bool:
    """Whether a text ended what vLLM was at."""
    prompt = each.tokens[: each.planned.loss_ranges[0].start]
    return not any(
        stack.decoder.answers[sample_id].token_ids == each.said[0]
        for request in stack.decoder.decodes
        if list(request.token_ids) == prompt
        for sample_id in request.sample_ids
    )


async def test_an_openai_client_is_told_what_vllm_samples_and_its_session_trains_on_that(stack):
    one, other = await pair(stack)
    async with agent(one) as model:
        messages = await work(model, BEGIN)
        assert [each["role"] for each in messages].count("tool") == CALLS
        # The next turn streamed: the same conversation goes on.
        text, calls, tokens = await streamed(model, messages, tools=[LOOK], logprobs=True)
        newest = sampled(stack)[-1]
        assert [token.logprob for token in tokens] == pytest.approx(newest.logprobs, abs=1e-6)
        whole = "".join(token.token for token in tokens)
        assert whole == CODEC.decode_all(newest.token_ids)
        assert whole.startswith(text)
        assert [call["at"] for _, call in calls] == [
            int(at) for at in re.findall(r'"at": ([1-9]\d)}}</tool_call>', whole)
        ]
    async with agent(other) as model:
        names = [each.id async for each in await model.models.list()]
        # Several answers at once, each with draws of its own, and with the same seed the same ones again.
        asked = {"model": "any", "messages": BEGIN, "max_tokens": 24, "seed": 7, "n": 3}
        first = await model.chat.completions.create(**asked)
        said = [choice.message.content for choice in first.choices]
        assert (len(set(said)), first.model) == (3, names[0])
        again = await model.chat.completions.create(**asked)
        assert [choice.message.content for choice in again.choices] == said
        assert (await model.chat.completions.create(**{**asked, "seed": 8})).choices[0].message.content != said[0]
        # An answer ends before the text that stops it, whose tokens were sampled, too.
        stop = (said[0] or "")[3]
        stopped = await model.chat.completions.create(**{**asked, "n": 1}, stop=stop)
        assert stopped.choices[0].message.content == (said[0] or "").partition(stop)[0]
        assert stopped.choices[0].finish_reason == "stop"
        plain = await model.completions.create(model="any", prompt="ab", max_tokens=8, logprobs=0)
        assert plain.choices[0].text == CODEC.decode(sampled(stack)[-1].token_ids)
    for session, reward in ((one, 1.0), (other, 0.0)):
        assert (await stack.client.close_session(session.session_id, reward)).state is SessionState.CLOSED
    trained = await stack.train()
    rewards: dict[str, set[float]] = {}
    for each in trained:
        rewards.setdefault(each.planned.rollout_id, set()).add(each.planned.reward)
        sequence = turns(stack, each.tokens, each.planned.loss_ranges)
        assert all(prefix_of(first, second) for first, second in itertools.pairwise(sequence))
        logprobs = [logprob for turn in sequence for logprob in turn.logprobs]
        assert np.array_equal(each.made.engine_logps, np.array(logprobs, np.float32))
        # vLLM tells the experts of what it brought to an end.
        assert each.made.known_N.all() or was_cut(stack, each)
    assert sum(was_cut(stack, each) for each in trained) <= 1
    assert sorted(rewards.values(), key=min) == [{0.0}, {1.0}]
    # All that was answered is there, and no more: a conversation, and answers that each began one.
    assert sum(len(each.said) for each in trained) == len(sampled(stack))
    longest = max(trained, key=lambda each: len(each.said))
    assert len(longest.said) > CALLS
    assert CODEC.encode(CODEC.decode_all(longest.tokens)) != longest.tokens
    first, *later = turns(stack, longest.tokens, longest.planned.loss_ranges)
    for turn in later:
        assert turn.cached_count >= (len(first.prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert sorted(len(each.said) for each in trained)[:-1] == [1] * (len(trained) - 1)


async def test_what_one_session_said_is_no_part_of_another_that_repeats_it(stack):
    one, other = await pair(stack)
    async with agent(one) as model, agent(other) as stranger:
        messages = await work(model, BEGIN)
        before = len(stack.decoder.decodes)
        await stranger.chat.completions.create(model="any", messages=[*messages, *BEGIN], tools=[LOOK], max_tokens=8)
        (request,) = stack.decoder.decodes[before:]
        mine = CODEC.decode_all(list(request.token_ids))
        theirs = stack.decoder.decodes[before - 1].token_ids
        # The same text, but encoded: none of the tokens that the other was told.
        assert CODEC.decode_all(list(theirs)) in mine
        assert list(request.token_ids[: len(theirs)]) != list(theirs)
        assert list(request.token_ids) == CODEC.encode(mine)
    for key in ("none", one.key[::-1], one.session_id, f"{one.key}{other.key}"):
        async with agent(one, key) as nobody:
            asked = nobody.chat.completions.create(model="any", messages=BEGIN)
            assert await code_of(asked) == (401, "invalid_api_key")
    await stack.client.close_session(one.session_id, 1.0)
    async with agent(one) as model, agent(other) as stranger:
        late = model.chat.completions.create(model="any", messages=BEGIN)
        assert await code_of(late) == (410, "session_ended")
        await stranger.chat.completions.create(model="any", messages=BEGIN, max_tokens=4)
    await stack.client.close_session(other.session_id, 0.0)
    trained = await stack.train()
    assert {each.planned.reward for each in trained} == {0.0, 1.0}
    told = {each.planned.reward: [] for each in trained}
    for each in trained:
        told[each.planned.reward] += each.said
    assert len(told[0.0]) == 2, "the stranger's own answers alone"
