"""When a call that failed is made again: only on UNAVAILABLE, with growing pauses, until its time is up.

Every call of this client may be repeated: it reads, or its `request_id` makes a repeat harmless.
"""

from __future__ import annotations

import math
import random
import time

import grpc

from slipstream_client.errors import DeadlineExceeded, SlipstreamClientError, Unreachable, from_rpc_error

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
STREAM_S = 300.0
"""A stream is opened anew after this long: no call is without a deadline."""


class Attempts:
    """The attempts at one call, or at keeping one stream open."""

    def __init__(self, address: str, patience_s: float, timeout_s: float = math.inf) -> None:
        """Give up after `patience_s` without an answer, and at `timeout_s` in any case."""
        self._address = address
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._ends_s = time.monotonic() + timeout_s
        self.answered()

    def answered(self) -> None:
        """The server answered: patience starts anew."""
        self._gives_up_s = min(time.monotonic() + self._patience_s, self._ends_s)
        self._pause_s = FIRST_PAUSE_S
        self._count = 0
        self._unavailable: SlipstreamClientError | None = None

    @property
    def left_s(self) -> float:
        """Until it is given up, in seconds."""
        return self._gives_up_s - time.monotonic()

    def no_room_s(self, error: SlipstreamClientError) -> float:
        """How long to wait before the next attempt where the server had no room; raises `error` if there is no time."""
        pause_s = MAX_PAUSE_S * (0.5 + random.random() / 2)
        if pause_s >= self.left_s:
            raise error
        return pause_s

    @property
    def call_s(self) -> float:
        """Deadline of the next attempt at a call, in seconds from now."""
        return max(self._gives_up_s - time.monotonic(), 0.001)

    @property
    def stream_s(self) -> float:
        """Deadline of the next stream, in seconds from now."""
        return max(min(STREAM_S, self._ends_s - time.monotonic()), 0.001)

    def pause_s(self, error: grpc.RpcError, *, stream: bool = False) -> float:
        """How long to wait before the next attempt; raises what the caller is to see if there is none."""
        failure = from_rpc_error(error)
        self._count += 1
        now = time.monotonic()
        if stream and isinstance(failure, DeadlineExceeded) and now < self._ends_s:
            return 0.0
        if stream and isinstance(failure, DeadlineExceeded):
            raise DeadlineExceeded(f"{self._timeout_s:g} s have passed") from None
        if isinstance(failure, DeadlineExceeded) and self._unavailable is not None:
            raise self._given_up(self._unavailable) from None  # the last attempt had no time: it says nothing new
        if isinstance(failure, DeadlineExceeded):
            raise DeadlineExceeded(f"{self._address} did not answer in time", metadata=failure.metadata) from None
        if failure.code is not grpc.StatusCode.UNAVAILABLE:
            raise failure from None
        self._unavailable = failure
        pause_s = self._pause_s * (0.5 + random.random() / 2)
        if now + pause_s >= self._gives_up_s:
            raise self._given_up(failure) from None
        self._pause_s = min(self._pause_s * 2, MAX_PAUSE_S)
        return pause_s

    def _given_up(self, failure: SlipstreamClientError) -> SlipstreamClientError:
        if not isinstance(failure, Unreachable):
            return failure
        cause = str(failure).rpartition(": ")[2].rstrip(".)]")
        attempts = "1 attempt" if self._count == 1 else f"{self._count} attempts"
        return Unreachable(
            f"{self._address} cannot be reached: {cause} ({attempts})", metadata={"address": self._address}
        )
