"""Rows that nobody needs are released at their holder, though it may be away just then."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from slipstream.api.rollout.v1 import rows_pb2, rows_pb2_grpc
from slipstream.api.types.v1 import types_pb2
from slipstream.common.auth import Access
from slipstream.common.channel import open_channel
from slipstream.orchestrator import releaser
from slipstream.orchestrator.releaser import RowsReleaser
from tests.ports import free_port


class Holder(rows_pb2_grpc.RowsServiceServicer):
    """Remembers what was released."""

    def __init__(self) -> None:
        self.released: set[str] = set()

    async def ReleaseRows(self, request: rows_pb2.ReleaseRowsRequest, context: Any) -> rows_pb2.ReleaseRowsResponse:
        self.released.update(request.keys)
        return rows_pb2.ReleaseRowsResponse(released_count=len(request.keys))

    async def serve(self, port: int) -> grpc.aio.Server:
        server = grpc.aio.server()
        rows_pb2_grpc.add_RowsServiceServicer_to_server(self, server)
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        return server


def refs(port: int, *keys: str) -> list[types_pb2.RowsRef]:
    return [types_pb2.RowsRef(holder=f"127.0.0.1:{port}", key=key, dtype="int32") for key in keys]


async def test_what_a_holder_did_not_hear_while_it_was_away_is_said_again() -> None:
    holder, rows = Holder(), RowsReleaser(lambda address: open_channel(address, Access()))
    port = free_port()
    server = await holder.serve(port)
    rows.release(refs(port, "a"))
    await rows.flush()
    assert holder.released == {"a"}
    await server.stop(None)
    rows.release(refs(port, "b", "c"))
    await rows.flush()
    rows.release(refs(port, "d"))
    server = await holder.serve(port)
    async with asyncio.timeout(60):
        while holder.released != {"a", "b", "c", "d"}:
            await asyncio.sleep(0.5)  # longer in all than a channel takes to look for its peer again
            await rows.flush()
    await rows.close()
    await server.stop(None)


async def test_a_holder_that_stays_away_is_given_up_and_what_is_held_back_is_bounded(monkeypatch: Any) -> None:
    rows = RowsReleaser(lambda address: open_channel(address, Access()))
    port = free_port()
    rows.release(refs(port, "a"))
    for _ in range(releaser._MAX_TRIES - 1):
        await rows.flush()
    assert {key for keys in rows._keys.values() for key in keys} == {"a"}
    await rows.flush()
    assert not rows._keys
    monkeypatch.setattr(releaser, "_MAX_HELD_BACK_KEYS", 2)
    rows.release(refs(port, "a", "b", "c"))
    await rows.flush()
    assert not rows._keys
    assert not rows._tries
    await rows.close()
