"""Client channels: deadline, keepalive, message size, token and TLS, the same for every caller.

A call without a timeout gets `DEFAULT_TIMEOUT_S` (unary) or `DEFAULT_STREAM_TIMEOUT_S`; nothing waits for
ever. There is no retry here: one layer retries, the one that knows what is idempotent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import grpc

from slipstream.common import tracing
from slipstream.common.auth import HEADER, Access

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_PENDING_CALLS = 16_384
DEFAULT_TIMEOUT_S = 60.0
DEFAULT_STREAM_TIMEOUT_S = 3600.0

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted service comes back at the same port: look again soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long an attempt may take: a peer that has much to do greets late, and the calls that wait for it fail with it.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
)


SERVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    # Two processes would share a port without an error otherwise.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # A peer that connects and says nothing that makes sense is let go.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Calls that come while the process is busy or stopped wait for it, until their deadline: beyond 1000 grpc would let
    # them go by as CANCELLED, more and more of them.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    # None of ours compresses, and a megabyte of deflated zeros would pass the limit above as a gigabyte.
    ("grpc.compression_enabled_algorithms_bitset", 1),
)


class AioChannel(grpc.aio.Channel):
    """An asyncio channel whose every call carries the token and the caller's trace, and has a deadline.

    A wrapper, not grpc's interceptors: those cost more than the rest of a small call's Python.
    """

    def __init__(self, channel: grpc.aio.Channel, token: str | None) -> None:
        self._channel = channel
        self._token = token

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _wrapped(self._channel.unary_unary(*args, **kwargs), self._token, DEFAULT_TIMEOUT_S)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _wrapped(self._channel.unary_stream(*args, **kwargs), self._token, DEFAULT_STREAM_TIMEOUT_S)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _wrapped(self._channel.stream_unary(*args, **kwargs), self._token, DEFAULT_STREAM_TIMEOUT_S)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _wrapped(self._channel.stream_stream(*args, **kwargs), self._token, DEFAULT_STREAM_TIMEOUT_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()


def open_channel(address: str, access: Access) -> AioChannel:
    """A channel to host:port, over TLS where `access` has certificates; connecting happens at the first call."""
    if access.tls is None:
        channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    else:
        channel = grpc.aio.secure_channel(address, access.tls.channel_credentials(), options=CHANNEL_OPTIONS)
    return AioChannel(channel, access.token)


def _wrapped(call: Callable[..., Any], token: str | None, default_timeout_s: float) -> Callable[..., Any]:
    header = () if token is None else ((HEADER, f"Bearer {token}"),)

    def invoke(
        request: Any,
        timeout: float | None = None,
        metadata: Sequence[tuple[str, str | bytes]] = (),
        **kwargs: Any,
    ) -> Any:
        trace = tracing.traceparent()
        if trace is not None:
            metadata = (*metadata, (tracing.HEADER, trace))
        return call(request, timeout=timeout or default_timeout_s, metadata=(*header, *metadata), **kwargs)

    return invoke
