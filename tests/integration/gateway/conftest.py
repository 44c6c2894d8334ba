"""A whole gateway in this process, before an orchestrator that knows a few keys and a runner with a script."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import openai
import pytest

from slipstream.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc, session_pb2, session_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.common.channels import Channels
from slipstream.common.config import ServiceConfig
from slipstream.common.errors import SessionUnknown
from slipstream.common.runtime import build_server
from slipstream.gateway.bodies import BodyRoom
from slipstream.gateway.config import GatewayConfig
from slipstream.gateway.handlers import Handlers
from slipstream.gateway.http import HttpServer
from slipstream.gateway.turns import Turns

STOP = types_pb2.FINISH_REASON_STOP
Script = Callable[[session_pb2.RunTurnRequest], AsyncIterator[session_pb2.RunTurnResponse]]


class FakeOrchestrator(rollout_pb2_grpc.RolloutServiceServicer):
    """Knows the sessions that the test opened."""

    def __init__(self) -> None:
        self.sessions: dict[bytes, rollout_pb2.Session] = {}
        self.address = ""

    def open(self, session_id: str, key: str) -> rollout_pb2.Session:
        session = rollout_pb2.Session(session_id=session_id, state=rollout_pb2.SESSION_STATE_OPEN)
        self.sessions[hashlib.sha256(key.encode()).digest()] = session
        return session

    async def FindSession(self, request: rollout_pb2.FindSessionRequest, context: Any) -> Any:
        if request.key_sha256 not in self.sessions:
            raise SessionUnknown("no session has this key")
        return rollout_pb2.FindSessionResponse(
            session=self.sessions[request.key_sha256], address=self.address, group_id="train-3", attempt=2
        )


class FakeRunner(session_pb2_grpc.SessionServiceServicer):
    """Answers turns by `script`; keeps what it was asked, and which turns were aborted."""

    def __init__(self) -> None:
        self.script: Script = says("hello")
        self.turns: list[session_pb2.RunTurnRequest] = []
        self.aborted: list[str] = []
        self.news = asyncio.Condition()

    async def RunTurn(
        self, request: session_pb2.RunTurnRequest, context: Any
    ) -> AsyncIterator[session_pb2.RunTurnResponse]:
        self.turns.append(request)
        try:
            async for piece in self.script(request):
                yield piece
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request.session_id)
            async with self.news:
                self.news.notify_all()
            raise


def says(*texts: str, tool_calls: tuple[session_pb2.ToolCall, ...] = (), reason: Any = STOP) -> Script:
    """A turn of these texts, a piece each, of one token each, for every choice."""

    async def script(request: session_pb2.RunTurnRequest) -> AsyncIterator[session_pb2.RunTurnResponse]:
        for index in range(request.choice_count):
            for number, text in enumerate(texts, start=1):
                last = number == len(texts)
                yield session_pb2.RunTurnResponse(
                    text=text,
                    choice_index=index,
                    tokens=[session_pb2.TokenPiece(token_id=7, text=text, logprob=-0.5)],
                    finish_reason=reason if last else None,
                    tool_calls=tool_calls if last else (),
                    prompt_token_count=11 if last else 0,
                    completion_token_count=len(texts) if last else 0,
                    cached_token_count=4 if last else 0,
                )

    return script


class World:
    """The gateway, its neighbours, and clients of it."""

    def __init__(self, orchestrator: FakeOrchestrator, runner: FakeRunner, http: HttpServer) -> None:
        self.orchestrator = orchestrator
        self.runner = runner
        self.http = http
        self.base_url = f"http://127.0.0.1:{http.port}/v1"

    def client(self, key: str = "mine") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=key, max_retries=0, timeout=60)

    async def until_aborted(self, count: int) -> None:
        async with asyncio.timeout(60), self.runner.news:
            await self.runner.news.wait_for(lambda: len(self.runner.aborted) >= count)


@pytest.fixture
def make_world(make_config: Callable[..., Any]) -> Callable[..., Any]:
    """`async with make_world(max_connections=2) as world:`; fields are those of the gateway's config.

    There are two sessions, with the keys "mine" and "yours".
    """

    @asynccontextmanager
    async def make(**fields: Any) -> AsyncIterator[World]:
        orchestrator, runner = FakeOrchestrator(), FakeRunner()
        async with AsyncExitStack() as stack:
            server, port = build_server(
                make_config(ServiceConfig),
                [
                    (rollout_pb2_grpc.add_RolloutServiceServicer_to_server, orchestrator, "RolloutService"),
                    (session_pb2_grpc.add_SessionServiceServicer_to_server, runner, "SessionService"),
                ],
            )
            await server.start()
            stack.push_async_callback(server.stop, None)
            orchestrator.address = f"127.0.0.1:{port}"
            orchestrator.open("session-a-0", "mine")
            orchestrator.open("session-b-0", "yours")
            channel = open_channel(orchestrator.address, Access())
            stack.push_async_callback(channel.close)
            channels = Channels(lambda address: open_channel(address, Access()))
            stack.push_async_callback(channels.close)
            config = make_config(GatewayConfig, **fields)
            turns = Turns(channel, channels, config.turn_timeout_s)
            bodies = BodyRoom(config.max_body_bytes, config.max_all_bodies_bytes)
            handlers = Handlers(turns, "my-run", bodies, config.body_timeout_s, config.write_timeout_s)
            http = HttpServer(config, handlers)
            await http.start()
            stack.push_async_callback(http.stop)
            yield World(orchestrator, runner, http)

    return make
