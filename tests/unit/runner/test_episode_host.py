"""Open episodes in an environment worker: whose they are, and how their calls and their ends follow each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from slipstream.common.auth import Access
from slipstream.common.errors import EnvironmentFailed
from slipstream.common.sandbox_client import SandboxClient
from slipstream.environments.base import Context, Limits, Score, Split, Task, Turn
from slipstream.environments.chat import Chat, plain_template
from slipstream.environments.messages import Message, ToolSpec
from slipstream.environments.tokenizer import TextCodec, build_tokenizer
from slipstream.environments.tools import Tools
from slipstream.runner.envclient import MAX_LINE_BYTES, EnvironmentWorker, TaskKey
from slipstream.runner.envworker import encoded
from slipstream.runner.episode_host import EpisodeHost

CODEC = TextCodec(build_tokenizer())
CHAT = Chat(CODEC, plain_template(CODEC))
TURN = {"token_ids": [*CODEC.encode("1"), CODEC.end_id], "stopped": True}


class Waiting:
    """Episodes whose second step never ends. What happens to them is in `events`."""

    name = "waiting"
    limits = Limits()
    needs_sandbox = False

    def __init__(self) -> None:
        self.events: list[str] = []

    def task(self, split: Split, index: int) -> Task:
        return Task(split, index)

    async def setup(self, task: Task, tools: Tools) -> WaitingEpisode:
        return WaitingEpisode(self.events)


class WaitingEpisode:
    """One of them."""

    tools: Sequence[ToolSpec] = ()

    role = "its own matter, where the environment has no roles"

    def __init__(self, events: list[str]) -> None:
        self.messages = [Message("user", "say 1")]
        self._events = events
        self._steps = 0

    async def step(self, message: Message) -> list[Message]:
        self._steps += 1
        if self._steps == 1:
            return [Message("user", "again")]
        self._events.append("a step begins")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # it has something to tidy up
            self._events.append("the step ends")
        return []

    async def score(self) -> Score:
        return Score(1.0, True)

    async def close(self) -> None:
        self._events.append("closed")


async def begun(host: EpisodeHost, environment: Waiting, count: int = 1) -> list[int]:
    """Numbers of new episodes."""
    request = {"task": {"split": "train", "index": 0}, "count": count}
    opened = await host.open(request, CHAT, 4096, environment, environment.limits)
    return [member["episode"] for member in opened["members"]]


async def test_an_episode_of_a_process_that_died_is_none_of_the_one_in_its_place():
    environment = Waiting()
    dead, next_one = EpisodeHost(None, 60.0), EpisodeHost(None, 60.0)
    theirs, ours = await begun(dead, environment, 8), await begun(next_one, environment, 8)
    for number in theirs:
        for call in (next_one.turn, next_one.end):
            assert "died" in (await call({"episode": number, **TURN}))["error"]
        await next_one.abandon({"episode": number})
    assert environment.events == []
    assert ["prompt" in await next_one.turn({"episode": number, **TURN}) for number in ours] == [True] * 8


async def test_a_step_ends_before_its_episode_is_closed():
    environment = Waiting()
    host = EpisodeHost(None, 60.0)
    (number,) = await begun(host, environment)
    await host.turn({"episode": number, **TURN})
    step = asyncio.create_task(host.turn({"episode": number, **TURN}))
    async with asyncio.timeout(30):
        while not environment.events:  # noqa: ASYNC110 a step tells
            await asyncio.sleep(0)
        await host.abandon({"episode": number})
        await asyncio.wait([step])
    assert environment.events == ["a step begins", "the step ends", "closed"]
    assert step.cancelled()


class Passing(Waiting):
    """Episodes of two roles that take turns, whatever is said."""

    roles = ("white", "black")

    def __init__(self, anew: bool) -> None:
        """`anew`: the other role's conversation begins each time."""
        super().__init__()
        self._anew = anew

    async def setup(self, task: Task, tools: Tools) -> WaitingEpisode:
        return PassingEpisode(self.events, self._anew)


class PassingEpisode(WaitingEpisode):
    tools = (ToolSpec("look"),)
    role = "white"

    def __init__(self, events: list[str], anew: bool) -> None:
        super().__init__(events)
        self._anew = anew

    async def step(self, message: Message) -> Turn | Context:
        self._events.append(f"{len(message.tool_calls)} calls")
        said = [Message("user", "go on")]
        if len(self._events) % 2:
            return Context(said, role="black") if self._anew else Turn("black", said)
        return Turn("white", said)


@pytest.mark.parametrize("anew", [False, True])
async def test_who_made_a_malformed_call_is_told_of_it_though_the_next_turn_is_anothers(anew: bool):
    environment = Passing(anew)
    host = EpisodeHost(None, 60.0)
    (number,) = await begun(host, environment)
    said = '<tool_call>{"name": "look", "arguments": {}}</tool_call><tool_call>look!</tool_call>'
    turn = {"token_ids": [*CODEC.encode(said), CODEC.end_id], "stopped": True}
    first = (await host.turn({"episode": number, **turn}))["prompt"]
    second = (await host.turn({"episode": number, **TURN}))["prompt"]
    assert environment.events == ["1 calls", "0 calls"]
    assert (first["role"], CODEC.decode_all(first["token_ids"])) == ("black", "go on\n")
    assert second["role"] == "white"
    assert CODEC.decode_all(second["token_ids"]) == "\nerror: this tool call is no JSON: look!\ngo on\n"


class Endless(Waiting):
    """Episodes that go on until a limit ends them, and note which."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.limits = limits

    async def setup(self, task: Task, tools: Tools) -> WaitingEpisode:
        episode = WaitingEpisode(self.events)

        async def step(message: Message) -> list[Message]:
            return [Message("user", "again")]

        episode.step = step
        episode.cut_short = self.events.append  # pyright: ignore[reportAttributeAccessIssue] it may have it
        return episode


@pytest.mark.parametrize(
    ("why", "limits", "context_tokens"),
    [
        ("turn", Limits(max_turns=99), 4096),
        ("context", Limits(max_turns=99), 30),
        ("turns", Limits(max_turns=3), 4096),
        ("tokens", Limits(max_turns=99, max_tokens=5), 4096),
        ("", Limits(max_turns=99), 4096),
    ],
)
async def test_an_episode_is_told_which_limit_ended_it_and_so_is_its_runner(
    why: str, limits: Limits, context_tokens: int
) -> None:
    environment = Endless(limits)
    host = EpisodeHost(None, 60.0)
    request = {"task": {"split": "train", "index": 0}, "count": 1}
    opened = await host.open(request, CHAT, context_tokens, environment, limits)
    number = opened["members"][0]["episode"]
    for _ in range(4 if why != "" else 2):
        turn = TURN if why != "turn" else {"token_ids": CODEC.encode("1"), "stopped": False}
        if "over" in await host.turn({"episode": number, **turn}):
            break
    else:
        assert why == ""
    assert (await host.end({"episode": number, "cut": ""}))["cut"] == why
    assert environment.events == [*([why] if why else []), "closed"]


async def test_a_limit_that_the_engine_met_is_told_before_the_score():
    environment = Endless(Limits())
    host = EpisodeHost(None, 60.0)
    (number,) = await begun(host, environment)
    assert (await host.end({"episode": number, "cut": "context"}))["cut"] == "context"
    assert environment.events == ["context", "closed"]


async def test_an_end_closes_the_episode_once():
    environment = Waiting()
    host = EpisodeHost(None, 60.0)
    (number,) = await begun(host, environment)
    assert (await host.end({"episode": number}))["score"]["reward"] == 1.0
    await host.abandon({"episode": number})
    await host.close()
    assert environment.events == ["closed"]


async def test_what_is_too_long_for_a_line_is_refused_on_either_side():
    with pytest.raises(ValueError, match=r"the answer is .* bytes, of which the runner takes"):
        encoded({"id": 1, "text": "x" * MAX_LINE_BYTES})
    worker = EnvironmentWorker([], 60.0, ["waiting"])
    long = [10**9] * (MAX_LINE_BYTES // 10)
    with pytest.raises(EnvironmentFailed, match=r"this is .* bytes for the environment worker"):
        await worker.score(TaskKey("waiting", "train", 0), [(long, True)])


class NeedingASandbox(Waiting):
    """Episodes whose first step runs a program."""

    needs_sandbox = True
    session: SandboxClient

    async def setup(self, task: Task, tools: Tools) -> WaitingEpisode:
        episode = WaitingEpisode(self.events)
        session = tools.open_session()
        assert isinstance(session, SandboxClient)
        self.session = session

        async def step(message: Message) -> list[Message]:
            try:
                await session.run(["true"])
            finally:
                await session.close()
            return []

        episode.step = step
        return episode


@pytest.mark.parametrize(("away_timeout_s", "step_timeout_s"), [(0.1, 30.0), (30.0, 0.3)])
async def test_a_step_that_finds_no_executor_says_that_it_is_away(away_timeout_s: float, step_timeout_s: float):
    async with SandboxClient("127.0.0.1:9", Access(), away_timeout_s=away_timeout_s) as sandbox:  # nobody listens
        environment = NeedingASandbox()
        environment.limits = Limits(step_timeout_s=step_timeout_s)
        host = EpisodeHost(sandbox, 60.0)
        (number,) = await begun(host, environment)
        asking = asyncio.create_task(environment.session.run(["true"]))
        async with asyncio.timeout(30):
            while not environment.session.away:  # noqa: ASYNC110 the first call that is refused says so
                await asyncio.sleep(0.01)
        answer = await asyncio.create_task(host.turn({"episode": number, **TURN}))
        assert answer["away"], answer
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await host.close()
