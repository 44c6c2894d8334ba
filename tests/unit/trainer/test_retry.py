"""How long a trainer repeats a call to a peer that has no room."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.common.errors import BroadcastStoreFull, DiskFull, SlipstreamError
from slipstream.trainer import loop
from slipstream.trainer.status import Status


@pytest.mark.parametrize(
    ("error", "waited_for"),
    [
        (DiskFull("full", path="/x"), True),
        (BroadcastStoreFull("full", waits_for="redis"), True),
        (BroadcastStoreFull("full", waits_for=""), False),
    ],
)
async def test_room_that_will_be_is_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, error: SlipstreamError, waited_for: bool
) -> None:
    monkeypatch.setattr(loop, "PEER_TIMEOUT_S", 0.05)
    monkeypatch.setattr(loop, "RETRY_PAUSE_S", 0.02)
    training: Any = SimpleNamespace(_status=Status())
    room = asyncio.Event()

    async def publish() -> str:
        if not room.is_set():
            raise error
        return "published"

    publishing = asyncio.create_task(loop.TrainingLoop._retry(training, publish))
    await asyncio.sleep(0.4)
    assert training._status.disk_full == waited_for
    room.set()
    if waited_for:
        assert await publishing == "published"
    else:
        with pytest.raises(type(error)):
            await publishing
    assert not training._status.disk_full
