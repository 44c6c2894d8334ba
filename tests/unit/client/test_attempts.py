"""When a call is made again, and what its caller sees in the end."""

from __future__ import annotations

import grpc
import pytest

from slipstream_client.attempts import Attempts
from slipstream_client.errors import DeadlineExceeded, Draining, Unreachable
from slipstream_client.status import STATUS_KEY, status_bytes


class Failed(grpc.RpcError):
    """A call that failed so."""

    def __init__(self, code: grpc.StatusCode, details: str, reason: str = "") -> None:
        super().__init__(details)
        self._code, self._details, self._reason = code, details, reason

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        if not self._reason:
            return ()
        return ((STATUS_KEY, status_bytes(self._code.value[0], self._details, self._reason, {})),)


STOPPING = Failed(grpc.StatusCode.UNAVAILABLE, "this process is stopping", "DRAINING")
LATE = Failed(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


def test_a_last_attempt_without_time_does_not_hide_why_the_others_failed() -> None:
    attempts = Attempts("somewhere", patience_s=60.0)
    assert attempts.pause_s(STOPPING) > 0
    with pytest.raises(Draining, match="stopping"):
        attempts.pause_s(LATE)


def test_a_call_that_was_never_answered_says_so() -> None:
    attempts = Attempts("somewhere", patience_s=60.0)
    with pytest.raises(DeadlineExceeded, match="somewhere did not answer in time"):
        attempts.pause_s(LATE)
    attempts.pause_s(STOPPING)
    attempts.answered()
    with pytest.raises(DeadlineExceeded):
        attempts.pause_s(LATE)


@pytest.mark.parametrize(
    ("details", "cause"),
    [
        (
            "errors resolving nowhere:99: [field:hostname lookup error:address lookup failed for nowhere:99: "
            "Domain name not found]",
            "Domain name not found",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: "
            "Failed to connect to remote host: Connection refused",
            "Connection refused",
        ),
    ],
)
def test_where_nobody_is_the_last_cause_is_said_without_what_was_around_it(details: str, cause: str) -> None:
    with pytest.raises(Unreachable) as caught:
        Attempts("nowhere:99", patience_s=0.0).pause_s(Failed(grpc.StatusCode.UNAVAILABLE, details))
    assert str(caught.value) == f"nowhere:99 cannot be reached: {cause} (1 attempt)"
