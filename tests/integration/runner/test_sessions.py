"""Sessions of outside agents at a whole runner, with stand-ins for engines that say what the test wants."""

from __future__ import annotations

import asyncio
import os
import uuid
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from slipstream.api.inference.v1 import teacher_pb2, teacher_pb2_grpc
from slipstream.api.rollout.v1 import runner_pb2, session_pb2, session_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.config import ListenConfig, ServiceConfig, WorkerEndpoint
from slipstream.common.errors import (
    Draining,
    InvalidRequest,
    SamplingBiased,
    SessionEnded,
    SessionLimitReached,
    SessionUnknown,
    SlipstreamError,
    Unreachable,
    rpc_errors,
)
from slipstream.environments.tokenizer import TextCodec, build_tokenizer
from slipstream.runner.config import SessionLimits

from .conftest import SERVICES, World, environment

pytestmark = pytest.mark.asyncio(loop_scope="module")
CODEC = TextCodec(build_tokenizer())
END = CODEC.end_id
FINISHED, FAILED = runner_pb2.GROUP_OUTCOME_FINISHED, runner_pb2.GROUP_OUTCOME_FAILED
STOP = types_pb2.FINISH_REASON_STOP
TOOLS = '[{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]'


def user(text: str) -> session_pb2.ChatMessage:
    return session_pb2.ChatMessage(role="user", content=text)


def assistant(text: str) -> session_pb2.ChatMessage:
    return session_pb2.ChatMessage(role="assistant", content=text)


class Agent:
    """Drives the sessions of one group."""

    def __init__(self, world: Any, stub: Any, name: str) -> None:
        self.world, self.stub, self.name = world, stub, name

    def __call__(self, index: int) -> str:
        return f"{self.name}-{index}"

    async def pieces(self, index: int, *messages: Any, **fields: Any) -> list[session_pb2.RunTurnResponse]:
        request = session_pb2.RunTurnRequest(
            request_id=uuid.uuid4().hex, session_id=self(index), messages=messages, **fields
        )
        with rpc_errors():
            return [piece async for piece in self.stub.RunTurn(request, timeout=60)]

    async def say(self, index: int, *messages: Any, **fields: Any) -> str:
        """The text of one answer."""
        return "".join(piece.text for piece in await self.pieces(index, *messages, **fields))

    async def close(self, index: int, reward: float = 0.0, **fields: Any) -> None:
        request = session_pb2.EndSessionRequest(
            request_id=uuid.uuid4().hex, session_id=self(index), reward=reward, **fields
        )
        with rpc_errors():
            await self.stub.EndSession(request, timeout=60)

    async def report(self) -> runner_pb2.GroupReport:
        return await self.world.report(self.name)

    async def ids(self, ref: types_pb2.RowsRef) -> list[int]:
        _, data = await self.world.fetch(ref.key)
        return array("i", data).tolist()


@asynccontextmanager
async def sessions(
    world: Any, count: int = 1, idle_ms: int = 600_000, deadline_ms: int = 600_000
) -> AsyncIterator[Agent]:
    """A group of sessions at the runner of `world`."""
    name = f"session-{uuid.uuid4().hex}"
    world.orchestrator.waiting.append(
        runner_pb2.GroupAssignment(
            group_id=name,
            attempt=1,
            purpose=runner_pb2.GROUP_PURPOSE_TRAINING,
            environment="good",
            split="train",
            sample_count=count,
            sampling=types_pb2.Sampling(temperature=1.0, max_new_tokens=64),
            dispatch_version=types_pb2.PolicyVersion(incarnation=1, step=3),
            salt="run/1.3/float32",
            deadline_ms=deadline_ms,
            session_group=runner_pb2.SessionGroup(name=name, idle_timeout_ms=idle_ms),
        )
    )
    await world.orchestrator.tell()
    async with open_channel(world.address, Access()) as channel:
        yield Agent(world, session_pb2_grpc.SessionServiceStub(channel), name)


def engines(world: Any, *, open: bool = True, **fields: Any) -> None:
    """Have all engines answer so; unless `open`, they wait after the first part of an answer."""
    for worker in world.workers.values():
        for name, value in fields.items():
            setattr(worker, name, value)
        if open:
            worker.gate.set()
        else:
            worker.gate.clear()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_runner(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """A runner for all tests of this file: its processes take seconds to start."""
    directory = tmp_path_factory.mktemp("sessions")
    paths = [str(SERVICES), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]

    def make_config(config_class: type[ServiceConfig] = ServiceConfig, **fields: Any) -> ServiceConfig:
        common = {"run_id": "sessions", "run_dir": directory, "listen": ListenConfig(), "drain_timeout_s": 2.0}
        return config_class(**{**common, **fields})

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        async with AsyncExitStack() as stack:
            world = World(make_config, stack)
            await world.start(directory, environments=[environment()])
            await world.until_up()
            yield world


@pytest.fixture
def world(one_runner: World) -> World:
    """Its engines as they are at first."""
    engines(one_runner, says=lambda prompt: prompt.split()[-1], tokens_a_message=0)
    one_runner.events.clear()
    for worker in one_runner.workers.values():
        worker.decodes.clear()
    return one_runner


async def test_a_trajectory_of_turns_is_its_tokens_as_they_were_sampled(world: Any) -> None:
    async with sessions(world, count=2) as agent:
        first = await agent.pieces(0, user("say 3"))
        assert [(piece.text, piece.finish_reason) for piece in first] == [("3", STOP)]
        assert (first[0].prompt_token_count, first[0].completion_token_count) == (6, 2)
        # What clients send back of an answer is trimmed or not, and never encoded again.
        assert await agent.say(0, user("say 3"), assistant(" 3\n"), user("now 12")) == "12"
        assert await agent.say(1, user("another 7")) == "7"
        await agent.close(0, 1.0)
        await agent.close(1, 0.0, advantage=-2.0)
        report = await agent.report()
        assert (report.outcome, [record.reward for record in report.rollouts]) == (FINISHED, [1.0, 0.0])
        one, other = report.rollouts
        expected = [*CODEC.encode("say 3\n3"), END, *CODEC.encode("\nnow 12\n12"), END]
        assert await agent.ids(one.token_ids) == expected
        assert [(part.start, part.end) for part in one.loss_ranges] == [(6, 8), (len(expected) - 3, len(expected))]
        assert (one.turn_count, other.turn_count) == (2, 1)
        assert not one.HasField("advantage")
        assert other.advantage == -2.0
        decodes = [request for worker in world.workers.values() for request in worker.decodes]
        assert all(request.for_training and request.capture_routes for request in decodes)


async def test_answers_stream_piece_by_piece_without_waiting_for_their_end(world: Any) -> None:
    engines(world, says=lambda prompt: "one two three", tokens_a_message=4, open=False)
    async with sessions(world) as agent:
        request = session_pb2.RunTurnRequest(
            request_id="r", session_id=agent(0), messages=[user("count")], stream=True, logprobs=True
        )
        stream = aiter(agent.stub.RunTurn(request, timeout=60))
        first = await anext(stream)
        assert first.text == "one", "a space at its end may be all that comes"
        assert [(token.text, token.logprob) for token in first.tokens] == [
            (text, -0.5 * (position + 1)) for position, text in enumerate("one ")
        ]
        engines(world)
        rest = [piece async for piece in stream]
        assert "".join(piece.text for piece in rest) == " two three"
        assert rest[-1].finish_reason == STOP
        assert sum(len(piece.tokens) for piece in rest) == len("two three") + 1
        await agent.close(0, 1.0)
        (record,) = (await agent.report()).rollouts
        assert await agent.ids(record.token_ids) == [*CODEC.encode("count\none two three"), END]


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_tools_are_read_and_never_shown_as_text(world: Any, stream: bool) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    engines(world, says=lambda prompt: "so: " + call if "tool" not in prompt else "2", tokens_a_message=5)
    async with sessions(world) as agent:
        pieces = await agent.pieces(0, user("1 and 1"), tools_json=TOOLS, stream=stream)
        assert "".join(piece.text for piece in pieces) == "so:"
        (asked,) = pieces[-1].tool_calls
        assert (asked.name, asked.arguments_json) == ("add", '{"a": 1}')
        said = session_pb2.ChatMessage(role="assistant", content="so:", tool_calls=[asked])
        told = session_pb2.ChatMessage(role="tool", tool_call_id=asked.id, content="tool says 2")
        await agent.say(0, user("1 and 1"), said, told, tools_json=TOOLS, stream=stream)
        await agent.close(0, 1.0)
        (record,) = (await agent.report()).rollouts
        assert record.turn_count == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_text_ends_an_answer_and_its_tokens_stay(world: Any, stream: bool) -> None:
    engines(world, says=lambda prompt: "yes. no. never" if prompt.startswith("go") else "fine", tokens_a_message=3)
    async with sessions(world) as agent:
        pieces = await agent.pieces(0, user("go"), stop=[". n"], stream=stream)
        assert "".join(piece.text for piece in pieces) == "yes"
        assert (pieces[-1].finish_reason, pieces[-1].completion_token_count) == (STOP, len("yes. n"))
        engines(world, says=lambda prompt: "fine")
        assert await agent.say(0, user("go"), assistant("yes"), user("on"), stream=stream) == "fine"
        await agent.close(0, 1.0)
        (record,) = (await agent.report()).rollouts
        assert not record.further_samples, "the second turn went on from the first"
        # The answer ended without the end token, which the template has there: nobody sampled it.
        expected = [*CODEC.encode("go\nyes. n"), END, *CODEC.encode("\non\nfine"), END]
        assert await agent.ids(record.token_ids) == expected
        assert [(part.start, part.end) for part in record.loss_ranges] == [(3, 9), (len(expected) - 5, len(expected))]
        assert any(request for worker in world.workers.values() for request in worker.events if request[0] == "aborted")


async def test_history_that_changed_and_several_choices_are_samples_of_one_rollout(world: Any) -> None:
    def begun(why: str) -> float:
        labels = {"environment": "session", "why": why}
        return REGISTRY.get_sample_value("slipstream_runner_samples_begun_total", labels) or 0.0

    before = {why: begun(why) for why in ("first", "history")}
    async with sessions(world) as agent:
        pieces = await agent.pieces(0, user("say 3"), choice_count=2)
        assert sorted((piece.choice_index, piece.text) for piece in pieces) == [(0, "3"), (1, "3")]
        await agent.say(0, user("forget it, say 4"))
        assert {why: begun(why) - count for why, count in before.items()} == {"first": 1, "history": 2}
        await agent.close(0, 1.0)
        (record,) = (await agent.report()).rollouts
        assert len(record.further_samples) == 2
        keys = {record.token_ids.key, *(sample.token_ids.key for sample in record.further_samples)}
        assert len(keys) == 3


async def test_prompts_are_taken_as_they_are(world: Any) -> None:
    async with sessions(world) as agent:
        assert await agent.say(0, prompt="count to 9") == "9"
        await agent.close(0, 1.0)
        (record,) = (await agent.report()).rollouts
        assert await agent.ids(record.token_ids) == [*CODEC.encode("count to 99"), END]


async def test_only_the_sampling_of_the_session_is_taken(world: Any) -> None:
    async with sessions(world) as agent:
        for fields in ({"temperature": 0.7}, {"top_p": 0.9}):
            with pytest.raises(SamplingBiased) as refused:
                await agent.say(0, user("say 3"), **fields)
            assert refused.value.metadata["field"] in fields
        assert await agent.say(0, user("say 3"), temperature=1.0, top_p=1.0, seed=5, max_new_tokens=2) == "3"
        (request,) = [request for worker in world.workers.values() for request in worker.decodes]
        assert (request.sampling.seed, request.sampling.max_new_tokens) == (5, 2)
        with pytest.raises(InvalidRequest):
            await agent.say(0, user("x"), tools_json="{}")


async def test_a_turn_whose_reader_goes_is_aborted_and_leaves_nothing(world: Any) -> None:
    engines(world, says=lambda prompt: "one two three", tokens_a_message=4, open=False)
    async with sessions(world) as agent:
        request = session_pb2.RunTurnRequest(request_id="r", session_id=agent(0), messages=[user("count")], stream=True)
        stream = agent.stub.RunTurn(request, timeout=60)
        await stream.read()
        stream.cancel()
        await world.until(lambda: any(event[0] == "aborted" for event in world.events))
        engines(world, tokens_a_message=0)
        assert await agent.say(0, user("count")) == "one two three"
        await agent.close(0, 1.0)
        (record,) = (await agent.report()).rollouts
        assert not record.further_samples
        assert await agent.ids(record.token_ids) == [*CODEC.encode("count\none two three"), END]


async def test_sessions_that_are_idle_or_late_end_and_the_others_train(world: Any) -> None:
    async with sessions(world, count=2, idle_ms=4000) as agent:
        await agent.say(1, user("say 3"))
        await agent.close(1, 1.0)
        report = await agent.report()
        assert [record.sample_index for record in report.rollouts] == [1]
    async with sessions(world, count=1, deadline_ms=300) as agent:
        report = await agent.report()
        assert (report.outcome, report.reason) == (FAILED, "NO_SESSION_CLOSED")


async def test_a_closed_or_unknown_session_takes_no_turns(world: Any) -> None:
    async with sessions(world, count=2) as agent:
        await agent.say(0, user("say 3"))
        await agent.close(0, 1.0)
        await agent.close(0, 1.0)
        with pytest.raises(SessionEnded):
            await agent.say(0, user("say 3"))
        with pytest.raises(SessionEnded) as ended:
            await agent.close(1, 1.0)
        assert ended.value.metadata["session_reason"] == "NO_TURNS"
        assert [record.sample_index for record in (await agent.report()).rollouts] == [0]
        with pytest.raises(SessionUnknown):
            await agent.close(0, 1.0)


async def test_a_cancelled_group_ends_its_turns_and_frees_the_engines_before_it_says_so(world: Any) -> None:
    engines(world, says=lambda prompt: "one two three", tokens_a_message=4, open=False)
    async with sessions(world) as agent:
        turn = asyncio.ensure_future(agent.say(0, user("count"), stream=True))
        await world.until(lambda: any(worker.decodes for worker in world.workers.values()))
        world.orchestrator.cancelled[agent.name] = "AGED_OUT"
        await world.orchestrator.tell()
        await world.until(lambda: ("acknowledged", "orchestrator", agent.name) in world.events)
        kinds = [event[0] for event in world.events]
        assert kinds.index("aborted") < kinds.index("acknowledged")
        with pytest.raises(Exception, match=r"abort|ended"):
            await turn


async def test_who_closes_a_session_twice_at_once_hears_of_one_end(world: Any) -> None:
    async with sessions(world) as agent:
        assert await agent.say(0, user("say 3")) == "3"
        engines(world, says=lambda prompt: "one two three", tokens_a_message=4, open=False)
        turn = asyncio.ensure_future(agent.say(0, user("count"), stream=True))
        await world.until(lambda: len([d for worker in world.workers.values() for d in worker.decodes]) >= 2)
        await asyncio.gather(agent.close(0, 1.0), agent.close(0, 1.0))
        with pytest.raises(SessionEnded):
            await turn
        assert [record.reward for record in (await agent.report()).rollouts] == [1.0]


async def test_what_is_too_large_for_the_texts_is_refused_and_other_conversations_stay(world: Any) -> None:
    async with sessions(world, count=2) as agent:
        assert await agent.say(0, user("say 3")) == "3"
        with pytest.raises(InvalidRequest):
            await agent.say(1, user("\x01" * 2**23))  # six times as much on its way
        assert await agent.say(0, user("say 3"), assistant("3"), user("now 12")) == "12"
        await agent.close(0, 1.0)
        await agent.close(1, discard=True)
        (record,) = (await agent.report()).rollouts
        assert not record.further_samples


async def restarted(world: Any, **fields: Any) -> None:
    """A new process of the runner, which takes calls: one that is ended while it starts leaves its server behind."""
    await world.restart(**fields)
    await world.until_up()


async def drive(agent: Agent, restart: Any = None) -> list[Any]:
    """A trajectory of all that there is to keep; `restart` happens in the middle of it. Returns what trains of it."""
    world, call = agent.world, '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    engines(world, says=lambda prompt: f"so: {call}")
    (asked,) = await agent.pieces(0, user("1 and 1"), tools_json=TOOLS)
    history = [user("1 and 1"), session_pb2.ChatMessage(role="assistant", content="so:", tool_calls=asked.tool_calls)]
    history.append(session_pb2.ChatMessage(role="tool", tool_call_id=asked.tool_calls[0].id, content="2"))
    engines(world, says=lambda prompt: "yes. no. never", tokens_a_message=3)
    history.append(assistant(await agent.say(0, *history, tools_json=TOOLS, stop=[". n"])))
    engines(world, says=lambda prompt: prompt.split()[-1], tokens_a_message=0)
    await agent.pieces(0, user("twice"), choice_count=2)
    await agent.say(0, prompt="as it is")
    await agent.say(1, user("say 3"))
    await agent.close(1, 0.5, advantage=-2.0)
    await agent.close(2, discard=True)
    if restart is not None:
        engines(world, says=lambda prompt: "one two three", tokens_a_message=4, open=False)
        asked_before = sum(len(worker.decodes) for worker in world.workers.values())
        broken = asyncio.ensure_future(agent.say(0, *history, user("on"), stream=True, tools_json=TOOLS))
        await world.until(lambda: sum(len(worker.decodes) for worker in world.workers.values()) > asked_before)
        await restart()
        with pytest.raises((SlipstreamError, asyncio.CancelledError)):
            await broken
    engines(world, says=lambda prompt: "fine", tokens_a_message=0)
    history += [user("on"), assistant(await until_taken_up(agent, 0, *history, user("on"), tools_json=TOOLS))]
    await agent.say(0, user("twice"), assistant("twice"), user("back"))
    with pytest.raises((SessionEnded, SessionUnknown)):
        await agent.say(1, user("more"))
    await agent.close(1, 0.5)
    await agent.close(0, 1.0)
    report = await agent.report()
    found: list[Any] = []
    for record in report.rollouts:
        found.append((record.sample_index, record.reward, record.advantage, record.turn_count))
        for sample in (record, *record.further_samples):
            _, data = await world.fetch(sample.logprobs.key)
            ranges = [(part.start, part.end) for part in sample.loss_ranges]
            spans = [(span.token_count, span.version.step) for span in sample.spans]
            found.append((await agent.ids(sample.token_ids), ranges, spans, array("f", data).tolist()))
            found.append((sample.prompt_token_count, sample.finish_reason, len(sample.routes)))
    return found


async def until_taken_up(agent: Agent, index: int, *messages: Any, **fields: Any) -> str:
    """What agents do: a turn that found no runner is asked again."""
    async with asyncio.timeout(100):
        while True:
            try:
                return await agent.say(index, *messages, **fields)
            except (SessionUnknown, Unreachable, Draining):
                await asyncio.sleep(0.05)


async def test_sessions_survive_a_restart_of_their_runner_token_by_token(world: Any) -> None:
    async with sessions(world, count=3) as agent:
        expected = await drive(agent)
    async with sessions(world, count=3) as agent:
        assert await drive(agent, restart=lambda: restarted(world)) == expected
        names = [d.request_id for worker in world.workers.values() for d in worker.decodes]
        assert len(names) == len(set(names)), "requests of both processes have names of their own"


def of_texts(process: psutil.Process) -> bool:
    """Whether it has the conversations, or guards the one that has."""
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:  # it ended meanwhile
        return False
    at = command.index("slipstream.runner.envworker") if "slipstream.runner.envworker" in command else -3
    return command[at + 2 : at + 3] == [""]


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def end_texts() -> None:
    """Kill the process that has the conversations, as memory that ran out would."""
    found = [process for process in psutil.Process().children(recursive=True) if of_texts(process)]
    assert found
    for process in found:
        with suppress(psutil.NoSuchProcess):  # it ended with the one before
            process.kill()
    async with asyncio.timeout(100):
        while any(map(lives, found)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_sessions_survive_the_death_of_the_process_that_has_their_texts_token_by_token(world: Any) -> None:
    async with sessions(world, count=3) as agent:
        expected = await drive(agent)
    async with sessions(world, count=3) as agent:
        assert await drive(agent, restart=end_texts) == expected


async def test_sessions_whose_turns_are_not_on_disk_end_where_their_texts_die(world: Any) -> None:
    async with sessions(world, count=2) as agent:
        assert await agent.say(0, user("say 3")) == "3"
        for path in world.directory.glob("spool/*/*.turns"):
            os.truncate(path, 0)
        await end_texts()
        for message in (user("now 12"), user("more")):
            with pytest.raises(SessionEnded) as ended:
                await until_taken_up(agent, 0, user("say 3"), assistant("3"), message)
            assert ended.value.metadata["session_reason"] == "TURNS_LOST"
        assert await until_taken_up(agent, 1, user("say 4")) == "4", "it had nothing to lose"
        await agent.close(1, 1.0)
        assert [record.sample_index for record in (await agent.report()).rollouts] == [1]


async def test_a_runner_that_is_told_to_stop_leaves_its_sessions_to_the_next(world: Any) -> None:
    async with sessions(world) as agent:
        await agent.say(0, user("say 3"))
        world.ask_to_stop()
        async with asyncio.timeout(60):
            await asyncio.wait([world.process])
        assert agent.name not in world.orchestrator.reports
        await restarted(world)
        assert await until_taken_up(agent, 0, user("say 3"), assistant("3"), user("now 12")) == "12"
        await agent.close(0, 1.0)
        (record,) = (await agent.report()).rollouts
        assert record.turn_count == 2
        assert not record.further_samples


class WaitingTeacher(teacher_pb2_grpc.TeacherServiceServicer):
    """Finds every token as likely as the next, once it may say so."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked: list[str] = []

    async def ScoreTokens(self, request: teacher_pb2.ScoreTokensRequest, context: Any) -> Any:
        self.asked += [CODEC.decode_all(list(sequence.token_ids)) for sequence in request.sequences]
        await self.gate.wait()
        counts = [sum(part.end - part.start for part in sequence.ranges) for sequence in request.sequences]
        return teacher_pb2.ScoreTokensResponse(
            sequences=[teacher_pb2.TokenLogprobs(logprobs=[-1.0] * count) for count in counts]
        )


async def test_sessions_that_wait_for_their_teacher_are_judged_with_their_routes_by_the_next(world: Any) -> None:
    teacher = WaitingTeacher()
    port = await world._serve([(teacher_pb2_grpc.add_TeacherServiceServicer_to_server, teacher, "")])
    await restarted(world, teacher_workers=[WorkerEndpoint(replica="teacher-1", address=f"127.0.0.1:{port}")])
    try:
        async with sessions(world) as agent:
            assert await until_taken_up(agent, 0, user("say 77")) == "77"
            await agent.close(0, 1.0)
            await world.until(lambda: any("say 77" in text for text in teacher.asked))
            engines(world, open=False)
            before = sum(len(worker.decodes) for worker in world.workers.values())
            await world.give()  # which the runner waits for while it drains, and gives rows back meanwhile
            await world.until(lambda: sum(len(worker.decodes) for worker in world.workers.values()) > before)
            world.ask_to_stop()
            await asyncio.wait([world.process], timeout=60)
            assert world.process.done()
            engines(world)
            teacher.gate.set()
            await restarted(world)
            (record,) = (await agent.report()).rollouts
        assert record.HasField("teacher_logprobs")
        given_back = {key for worker in world.workers.values() for key in worker.released_rows}
        assert {ref.key for ref in record.routes}
        assert not {ref.key for ref in record.routes} & given_back
    finally:
        await restarted(world, teacher_workers=[])


async def test_a_session_whose_kept_turns_cannot_be_read_ends_and_says_so(world: Any) -> None:
    async with sessions(world, count=2) as agent:
        await agent.say(0, user("a text to find"))
        await agent.say(1, user("say 3"))

        async def damage() -> None:
            await world.stop()
            files = (world.directory / "spool" / "runner-1").glob("*.turns")
            file = max(files, key=lambda path: int(path.stem))  # others are of sessions that nobody closed
            file.write_bytes(file.read_bytes().replace(b"a text to find", b"a text to lose"))
            await restarted(world)

        await damage()
        assert await until_taken_up(agent, 1, user("say 3"), assistant("3"), user("now 12")) == "12"
        with pytest.raises(SessionEnded) as ended:
            await agent.say(0, user("a text to find"))
        assert ended.value.metadata["session_reason"] == "TURNS_LOST"
        await agent.close(1, 1.0)
        assert [record.sample_index for record in (await agent.report()).rollouts] == [1]


async def test_what_a_session_may_take_is_bounded_and_the_limit_is_named(world: Any) -> None:
    await restarted(world, sessions=SessionLimits(max_turns=3, max_samples=2, max_text_bytes=4096))
    try:

        async def refused(index: int, *messages: Any, **fields: Any) -> tuple[str, str]:
            with pytest.raises(SessionLimitReached) as reached:
                await agent.say(index, *messages, **fields)
            return reached.value.metadata["name"], reached.value.metadata["limit"]

        async with sessions(world, count=2) as agent:
            assert await agent.say(0, user("say 3")) == "3"
            assert await refused(0, user("several"), choice_count=2) == ("runner.sessions.max_samples", "2")
            assert await refused(0, user("x" * 5000)) == ("runner.sessions.max_text_bytes", "4096")
            assert await agent.say(0, user("another 4")) == "4", "what was refused took no place"
            assert await refused(0, user("a third")) == ("runner.sessions.max_samples", "2")
            assert await agent.say(0, user("say 3"), assistant("3"), user("now 12")) == "12"
            assert await refused(0, user("say 3"), assistant("3"), user("on")) == ("runner.sessions.max_turns", "3")
            assert await agent.say(1, user("say 3")) == "3", "each session has its own"
            calls = {"tools_json": TOOLS + " " * 2500}  # which this model's template does not show
            assert await agent.say(1, user("say 3"), assistant("3"), user("now 12"), **calls) == "12"
            reached = await refused(1, user("say 3"), assistant("3"), user("now 12"), assistant("12"), **calls)
            assert reached == ("runner.sessions.max_text_bytes", "4096")
            await agent.close(0, 1.0)
            await agent.close(1, 0.0)
            (record, _) = (await agent.report()).rollouts
            assert (record.turn_count, len(record.further_samples)) == (3, 1)
    finally:
        await restarted(world, sessions=SessionLimits())
