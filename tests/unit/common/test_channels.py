"""Channels by address: one each, and never more than there may be."""

from __future__ import annotations

import asyncio
from typing import Any

from slipstream.common.channels import Channels


class Channel:
    """Notes that it was closed."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.closed = False

    async def close(self, grace: float | None = None) -> None:
        self.closed = True


async def test_the_channel_unused_for_longest_makes_room():
    opened: dict[str, Channel] = {}

    def open_channel(address: str) -> Any:
        opened[address] = Channel(address)
        return opened[address]

    channels = Channels(open_channel, capacity=2)
    first = channels.get("a")
    channels.get("b")
    assert channels.get("a") is first
    channels.get("c")
    await asyncio.sleep(0)
    assert len(channels) == 2
    assert [address for address, channel in opened.items() if channel.closed] == ["b"]
    await channels.close()
    assert all(channel.closed for channel in opened.values())
