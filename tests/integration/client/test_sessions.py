"""Sessions and run control through the client, at a whole orchestrator."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slipstream.api.rollout.v1 import session_pb2, session_pb2_grpc
from slipstream.common.runtime import build_server
from slipstream_client import (
    AsyncClient,
    Client,
    GatewayAbsent,
    InvalidRequest,
    Sampling,
    SamplingBiased,
    SessionsFull,
    SessionState,
    SessionUnknown,
)

URL = "http://127.0.0.1:1/v1"


class TakesEverything(session_pb2_grpc.SessionServiceServicer):
    async def EndSession(self, request: session_pb2.EndSessionRequest, context: Any) -> session_pb2.EndSessionResponse:
        return session_pb2.EndSessionResponse()


async def test_sessions_are_opened_listed_and_closed_by_both_clients(make_world: Any, make_config: Any) -> None:
    add = session_pb2_grpc.add_SessionServiceServicer_to_server
    server, port = build_server(make_config(), [(add, TakesEverything(), "SessionService")])
    await server.start()
    async with make_world(gateway_url=URL) as world, AsyncClient.connect(world.address) as client:
        world.publish(0)
        await world.until(lambda run: run.phase == "training")
        with pytest.raises(SessionsFull):
            await client.open_session(timeout_s=0.3)
        world.session_address = f"127.0.0.1:{port}"

        async def open_one() -> Any:
            opening = asyncio.ensure_future(client.open_session(labels={"who": "me"}, idle_timeout_s=9))
            async with asyncio.timeout(60):
                while not world.orchestrator.sequencer.line.counts["session"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await world.acquire(count=1)
            return await opening

        first, second = [await open_one() for _ in range(2)]
        assert (first.state, first.base_url, first.idle_timeout_s) == (SessionState.OPEN, URL, 9)
        assert first.key != second.key
        assert first.key not in repr(first)
        listed = [session async for session in client.list_sessions(labels={"who": "me"}, page_size=1)]
        assert [session.session_id for session in listed] == [first.session_id, second.session_id]
        assert [session.key for session in listed] == ["", ""]
        with pytest.raises(InvalidRequest) as refused:
            await client.close_session(first.session_id, 1.0)
        assert refused.value.metadata["field"] == "advantage"
        closed = await client.close_session(first.session_id, 1.0, advantage=0.5)
        assert (closed.state, closed.reward) == (SessionState.CLOSED, 1.0)
        assert (await client.close_session(second.session_id, discard=True)).reason == "DISCARDED"
        with pytest.raises(ValueError, match="reward: a session is closed with one"):
            await client.close_session(second.session_id)
        for call in (client.get_session("nobody"), client.close_session("nobody", 0.0)):
            with pytest.raises(SessionUnknown):
                await call
        with pytest.raises(SamplingBiased):
            await client.open_session(sampling=Sampling(max_new_tokens=4, top_p=0.5))

        def blocking() -> tuple[list[str], str]:
            with Client.connect(world.address) as other:
                states = [str(session.state) for session in other.list_sessions()]
                return states, str(other.get_session(first.session_id).state)

        assert await asyncio.to_thread(blocking) == (["closed", "ended"], "closed")
    await server.stop(None)


async def test_the_run_is_paused_gone_on_with_and_stopped_by_the_client(make_world: Any) -> None:
    async with make_world() as world, AsyncClient.connect(world.address) as client:
        world.publish(0)
        await world.until(lambda run: run.phase == "training")
        paused = await client.pause_run("lunch")
        assert (paused.state, paused.reason) == ("paused", "lunch")
        assert (await client.resume_run()).state == "running"
        run = await client.get_run()
        assert run.started_unix_s > 0
        assert 0 <= run.phase_fraction_done <= 1
        assert {worker.replica for worker in run.workers} == {"decode-1", "decode-2", "prefill-1"}
        assert (run.trained_group_counts, run.external_group_counts) == ({}, {})
        asked = await client.create_rollout(environment="words")
        assert (await client.cancel_rollout(asked.group_id)).ended
        assert (await client.get_run()).external_group_counts == {"words": 1}
        with pytest.raises(GatewayAbsent):
            await client.open_session()

        def stop() -> Any:
            with Client.connect(world.address) as other:
                return other.stop_run("enough")

        assert (await asyncio.to_thread(stop)).state == "stopped"
