"""Agents of openai-agents, unmodified, before the gateway and a whole runner: what they were told is what trains."""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import agents
import openai
import pytest
import pytest_asyncio

from slipstream.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc, runner_pb2, session_pb2, session_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.channels import Channels
from slipstream.common.config import ListenConfig, ServiceConfig
from slipstream.common.runtime import build_server
from slipstream.environments.tokenizer import TextCodec, build_tokenizer
from slipstream.gateway.bodies import BodyRoom
from slipstream.gateway.config import GatewayConfig
from slipstream.gateway.handlers import Handlers
from slipstream.gateway.http import HttpServer
from slipstream.gateway.turns import Turns

from .conftest import SERVICES, World, environment

pytestmark = pytest.mark.asyncio(loop_scope="module")
CODEC = TextCodec(build_tokenizer())
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
QUIET = agents.RunConfig(tracing_disabled=True)


class Desk(rollout_pb2_grpc.RolloutServiceServicer):
    """The orchestrator, as far as a gateway asks it: a key is the name of its session."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.names: dict[bytes, str] = {}

    async def FindSession(self, request: rollout_pb2.FindSessionRequest, context: Any) -> Any:
        session = rollout_pb2.Session(session_id=self.names[request.key_sha256], state=rollout_pb2.SESSION_STATE_OPEN)
        return rollout_pb2.FindSessionResponse(session=session, address=self._address)


class Place:
    """A runner with a gateway before it."""

    def __init__(self, world: World, desk: Desk, base_url: str) -> None:
        self.world, self._desk, self._base_url = world, desk, base_url

    @asynccontextmanager
    async def session(self) -> AsyncIterator[tuple[agents.OpenAIChatCompletionsModel, str]]:
        """A session by itself, as a model of the library's; and the name of its group."""
        name = f"session-{uuid.uuid4().hex}"
        self._desk.names[hashlib.sha256(name.encode()).digest()] = f"{name}-0"
        self.world.orchestrator.waiting.append(
            runner_pb2.GroupAssignment(
                group_id=name,
                attempt=1,
                purpose=runner_pb2.GROUP_PURPOSE_TRAINING,
                environment="good",
                sample_count=1,
                sampling=types_pb2.Sampling(temperature=1.0, max_new_tokens=128),
                dispatch_version=types_pb2.PolicyVersion(incarnation=1, step=3),
                salt="run/1.3/float32",
                deadline_ms=60_000,
                session_group=runner_pb2.SessionGroup(name=name, idle_timeout_ms=60_000),
            )
        )
        await self.world.orchestrator.tell()
        async with openai.AsyncOpenAI(base_url=self._base_url, api_key=name, max_retries=2) as client:
            yield agents.OpenAIChatCompletionsModel("policy", client), name

    async def trained(self, name: str) -> tuple[runner_pb2.RolloutRecord, str]:
        """Close the session; its record, and its first sample as text."""
        async with open_channel(self.world.address, Access()) as channel:
            end = session_pb2.EndSessionRequest(request_id="end", session_id=f"{name}-0", reward=1.0)
            await session_pb2_grpc.SessionServiceStub(channel).EndSession(end, timeout=60)
        (record,) = (await self.world.report(name)).rollouts
        _, data = await self.world.fetch(record.token_ids.key)
        return record, CODEC.decode_all(memoryview(data).cast("i").tolist())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    directory = tmp_path_factory.mktemp("agents")
    paths = [str(SERVICES), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]

    def make_config(config_class: type[ServiceConfig] = ServiceConfig, **fields: Any) -> Any:
        return config_class(**{"run_id": "agents", "run_dir": directory, "listen": ListenConfig(), **fields})

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        async with AsyncExitStack() as stack:
            world = World(make_config, stack)
            await world.start(directory, environments=[environment()])
            await world.until_up()
            desk = Desk(world.address)
            add = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
            server, port = build_server(make_config(), [(add, desk, "RolloutService")])
            await server.start()
            stack.push_async_callback(server.stop, None)
            channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{port}", Access()))
            channels = Channels(lambda address: open_channel(address, Access()))
            stack.push_async_callback(channels.close)
            config = make_config(GatewayConfig)
            bodies = BodyRoom(config.max_body_bytes, config.max_all_bodies_bytes)
            handlers = Handlers(Turns(channel, channels, config.turn_timeout_s), "policy", bodies, 30.0, 30.0)
            http = HttpServer(config, handlers)
            await http.start()
            stack.push_async_callback(http.stop)
            yield Place(world, desk, f"http://127.0.0.1:{http.port}/v1")


def says(place: Place, answer: Any) -> None:
    for worker in place.world.workers.values():
        worker.says, worker.tokens_a_message = answer, 4


@agents.function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return f"sum {a + b}"


def calculator(model: agents.Model) -> agents.Agent[Any]:
    return agents.Agent("calculator", instructions="be brief", model=model, tools=[add])


async def test_an_agent_calls_its_tools_and_answers(place: Place) -> None:
    says(place, lambda prompt: "it is 7" if "sum 7" in prompt else CALL)
    async with place.session() as (model, name):
        result = await agents.Runner.run(calculator(model), "what is 3 and 4?", run_config=QUIET)
        assert result.final_output == "it is 7"
        record, text = await place.trained(name)
    assert (record.turn_count, len(record.further_samples)) == (2, 0), "the second turn went on from the first"
    assert CALL in text
    assert text.index("what is 3 and 4?") < text.index(CALL) < text.index("sum 7") < text.index("it is 7")
    assert [part.end - part.start for part in record.loss_ranges] == [
        len(CODEC.encode(CALL)) + 1,
        len(CODEC.encode("it is 7")) + 1,
    ]


async def test_a_streamed_agent_hands_over_to_another_in_the_same_session(place: Place) -> None:
    hand_over = '<tool_call>{"name": "transfer_to_calculator", "arguments": {}}</tool_call>'

    def answer(prompt: str) -> str:
        if "sum 7" in prompt:
            return "it is 7"
        return CALL if "be brief" in prompt else hand_over

    says(place, answer)
    async with place.session() as (model, name):
        triage = agents.Agent("triage", instructions="find who knows", model=model, handoffs=[calculator(model)])
        result = agents.Runner.run_streamed(triage, "what is 3 and 4?", run_config=QUIET)
        deltas: list[str] = []
        async with asyncio.timeout(60):
            async for event in result.stream_events():
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                    deltas.append(event.data.delta)
        assert result.final_output == "it is 7" == "".join(deltas)
        assert result.last_agent.name == "calculator"
        record, text = await place.trained(name)
    assert record.turn_count == 3
    # The second agent has other instructions: its conversation is another sample of the same rollout.
    assert len(record.further_samples) == 1
    assert hand_over in text
