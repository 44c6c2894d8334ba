"""Channels to addresses that come with requests: opened once, bounded in number."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import grpc

CLOSE_GRACE_S = 60.0
"""How long calls may still run over a channel that made room for another."""


class Channels:
    """A channel an address; beyond `capacity` the one unused for longest is closed, its calls first."""

    def __init__(self, open_channel: Callable[[str], grpc.aio.Channel], capacity: int = 256) -> None:
        self._open_channel = open_channel
        self._capacity = capacity
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._channels)

    def get(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._open_channel(address)
            if len(self._channels) > self._capacity:
                _, unused = self._channels.popitem(last=False)
                task = asyncio.get_running_loop().create_task(unused.close(CLOSE_GRACE_S))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        self._channels.move_to_end(address)
        return channel

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
