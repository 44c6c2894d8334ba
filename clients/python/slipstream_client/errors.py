"""What a call may raise: one class for each reason that the public API gives.

    try:
        client.create_rollout(environment="spelling")
    except EnvironmentUnknown as error:
        print(error.metadata["known"])

A reason that this version does not know still has its code, reason and metadata, as a `SlipstreamClientError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import grpc

from slipstream_client.status import STATUS_KEY, error_info


class SlipstreamClientError(Exception):
    """A call that failed. `code`, `reason` and `metadata` are for programs, the message is for people."""

    default_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    default_reason: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code or self.default_code
        self.reason = reason or self.default_reason
        self.metadata = dict(metadata or {})


class InvalidRequest(SlipstreamClientError):
    """A field is missing or out of range: `metadata["field"]`, `["rule"]`, `["limit"]`. Fix the call."""

    default_code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_REQUEST"


class RequestIdReused(SlipstreamClientError):
    """A `request_id` of your own was used for another request before."""

    default_code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "REQUEST_ID_REUSED"


class Unauthenticated(SlipstreamClientError):
    """The token is missing or wrong."""

    default_code = grpc.StatusCode.UNAUTHENTICATED
    default_reason = "TOKEN_INVALID"


class EnvironmentUnknown(SlipstreamClientError):
    """The run has no environment of this name; `metadata["known"]` lists those it has."""

    default_code = grpc.StatusCode.NOT_FOUND
    default_reason = "ENVIRONMENT_UNKNOWN"


class RolloutUnknown(SlipstreamClientError):
    """This group was never created, or is no longer kept."""

    default_code = grpc.StatusCode.NOT_FOUND
    default_reason = "ROLLOUT_UNKNOWN"


class RolloutQueueFull(SlipstreamClientError):
    """`metadata["limit"]` groups wait or run already. Wait for some to end, then create more."""

    default_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "ROLLOUT_QUEUE_FULL"


class SessionUnknown(SlipstreamClientError):
    """This session was never opened, or is no longer kept."""

    default_code = grpc.StatusCode.NOT_FOUND
    default_reason = "SESSION_UNKNOWN"


class SessionsFull(SlipstreamClientError):
    """No admission slot came in time, or `metadata["limit"]` sessions are open. Close some, or try later."""

    default_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "SESSIONS_FULL"


class SamplingBiased(SlipstreamClientError):
    """`metadata["field"]` would draw other tokens than those of the policy that trains. Leave it out."""

    default_code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "SAMPLING_BIASED"


class GatewayAbsent(SlipstreamClientError):
    """The run has no gateway: it was started without `gateway.enabled`."""

    default_code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "GATEWAY_ABSENT"


class RunEnded(SlipstreamClientError):
    """The run has ended and takes no more work. A server says how in `metadata["state"]`."""

    default_code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "RUN_ENDED"


class Unsupported(SlipstreamClientError):
    """The server does not do that."""

    default_code = grpc.StatusCode.UNIMPLEMENTED
    default_reason = "UNSUPPORTED"


class Draining(SlipstreamClientError):
    """The server is stopping, and was so for as long as the call was repeated."""

    default_code = grpc.StatusCode.UNAVAILABLE
    default_reason = "DRAINING"


class Unreachable(SlipstreamClientError):
    """Nobody answered at the address for as long as the call was repeated."""

    default_code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNREACHABLE"


class DeadlineExceeded(SlipstreamClientError):
    """The call took longer than its `timeout_s`. Whether it had an effect is unknown."""

    default_code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class InternalError(SlipstreamClientError):
    """A bug at the server, whose log has the detail."""

    default_code = grpc.StatusCode.INTERNAL
    default_reason = "INTERNAL"


_CLASSES = SlipstreamClientError.__subclasses__()
BY_REASON = {cls.default_reason: cls for cls in _CLASSES}
# A status without our reason comes from grpc itself.
_BY_CODE = {
    cls.default_code: cls for cls in (Unreachable, DeadlineExceeded, Unsupported, Unauthenticated, InvalidRequest)
}


def from_rpc_error(error: grpc.RpcError) -> SlipstreamClientError:
    """The error that the status of a call stands for."""
    call: Any = error
    code: grpc.StatusCode = call.code()
    message = str(call.details() or code.name)
    status = dict(call.trailing_metadata() or ()).get(STATUS_KEY)
    info = error_info(status) if isinstance(status, bytes) else None
    if info is None and code is grpc.StatusCode.CANCELLED:  # not by this client: the server let the call go by
        return Unreachable(message)
    if info is None:
        return _BY_CODE.get(code, SlipstreamClientError)(message, code=code)
    reason, metadata = info
    return BY_REASON.get(reason, SlipstreamClientError)(message, code=code, reason=reason, metadata=metadata)
