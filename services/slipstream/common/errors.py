"""The table of reasons: one class is one (gRPC code, reason). Domain code raises these or lets bugs fly.

(domain, reason) is the contract, the message is for people. Only `rpc_boundary` turns an exception into
a status, and `from_rpc_error` rebuilds the same class at the caller, so both sides catch the same name.
Codes are picked by the caller's next move: fix the request (INVALID_ARGUMENT), wait for a state
(FAILED_PRECONDITION), start over (ABORTED), retry the same later (UNAVAILABLE), ask for less
(RESOURCE_EXHAUSTED).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ClassVar

import grpc
import structlog
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # pyright: ignore[reportMissingTypeStubs]
from grpc_status import rpc_status

log = structlog.get_logger()

DOMAIN = "slipstream"
STATUS_KEY = "grpc-status-details-bin"
RETRY_DELAY_MS = 200
MAX_MESSAGE_CHARS = 480
MAX_METADATA_CHARS = 240
"""What a status may carry of a caller's own words: all of it travels as metadata, of which HTTP/2 takes 8 KiB."""


class SlipstreamError(Exception):
    """A failure the caller can act on. Every value a program could want is in `metadata`."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    reason: ClassVar[str] = "UNKNOWN"
    by_reason: ClassVar[dict[str, type[SlipstreamError]]] = {}

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.metadata = {key: str(value) for key, value in metadata.items()}

    def __init_subclass__(cls) -> None:
        other = SlipstreamError.by_reason.setdefault(cls.reason, cls)
        if other is not cls:
            raise TypeError(f"reason {cls.reason} belongs to {other.__name__}")

    @property
    def message(self) -> str:
        return str(self.args[0])


# --- Every service ---------------------------------------------------------------------------------


class InvalidRequest(SlipstreamError):
    """A field is out of range or missing: `metadata["field"]`, `["rule"]`, `["limit"]`. Fix the request."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"


class RequestIdReused(SlipstreamError):
    """This `request_id` was used with another body. Take a new one for a new request."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "REQUEST_ID_REUSED"


class Unauthenticated(SlipstreamError):
    """The bearer token is missing or wrong. Send the run's token; a retry does not help."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "TOKEN_INVALID"


class Unsupported(SlipstreamError):
    """This server does not do that: `metadata["method"]`. Do not retry."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "UNSUPPORTED"


class NotFound(SlipstreamError):
    """Nothing has that name here, or it is gone: `metadata["name"]`."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"


class Draining(SlipstreamError):
    """This process is stopping and takes no new work. Use another, or retry after it is back."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "DRAINING"


class Unreachable(SlipstreamError):
    """The peer could not be reached, or the connection broke. Retry what is idempotent."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "UNREACHABLE"


class DeadlineExceeded(SlipstreamError):
    """The call took longer than its deadline; its effect is unknown. Retry with the same `request_id`."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class Overloaded(SlipstreamError):
    """A bound is reached: `metadata["limit"]`. Ask for less, or later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OVERLOADED"


class StreamStalled(SlipstreamError):
    """The client of a stream took or sent nothing for `metadata["limit_s"]` seconds. Call again, and go on reading."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "STREAM_STALLED"


class InternalError(SlipstreamError):
    """A bug at the server; the detail is in its log alone."""

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"


class DiskFull(SlipstreamError):
    """The disk of `metadata["path"]` has no room. Nothing was kept in part; try the same again when there is room."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "DISK_FULL"


class TooManyFiles(DiskFull):
    """The server may open no more files than `metadata["limit"]` (ulimit -n). Nothing was kept in part; try later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "TOO_MANY_FILES"


class StateUnavailable(SlipstreamError):
    """Redis is away, full, or takes no writes for now. Nothing is lost: wait and try again."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "STATE_UNAVAILABLE"


class StateConflict(SlipstreamError):
    """Others kept changing the same key: `metadata["key"]`. Read it again and start over."""

    code = grpc.StatusCode.ABORTED
    reason = "STATE_CONFLICT"


class FrameInvalid(SlipstreamError):
    """A byte stream broke its framing: no header first, a hole, or bytes past the announced end."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "FRAME_INVALID"


# --- Router and runner -------------------------------------------------------------------------------


class NoWorker(SlipstreamError):
    """No routable worker of `metadata["pool"]` serves the version. Back off and place again."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "NO_WORKER"


class PoolSaturated(SlipstreamError):
    """All workers of `metadata["pool"]` are full, or too many placements open. Back off and place again."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "POOL_SATURATED"


class OffsetOutOfRange(SlipstreamError):
    """The offset lies beyond the `metadata["size_bytes"]` of what is streamed. Start over from 0."""

    code = grpc.StatusCode.OUT_OF_RANGE
    reason = "OFFSET_OUT_OF_RANGE"


class EnvironmentFailed(SlipstreamError):
    """Environment code raised, or its process died: `metadata["environment"]`. The group fails."""

    code = grpc.StatusCode.ABORTED
    reason = "ENVIRONMENT_ERROR"


class EnvironmentTimeout(EnvironmentFailed):
    """Environment code did not answer within `environment_timeout_s`: its process is ended, and the group fails."""

    reason = "ENVIRONMENT_TIMEOUT"


class EnvironmentMemory(EnvironmentFailed):
    """An environment's process held more than `memory_limit_bytes` of its section: it is ended, with what it was at."""

    reason = "ENVIRONMENT_MEMORY"


class EnvironmentReplaced(EnvironmentFailed):
    """Other code blocked the process of this environment, which was replaced. What had begun there begins again."""

    reason = "ENVIRONMENT_REPLACED"


class RolloutTimeout(SlipstreamError):
    """A rollout took longer than its environment's `rollout_timeout_s`. The others of its group go on."""

    code = grpc.StatusCode.ABORTED
    reason = "ROLLOUT_TIMEOUT"


class SandboxAway(SlipstreamError):
    """No sandbox executor answers. The group that needed one is run again when it is back."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "SANDBOX_AWAY"


class TeacherAway(SlipstreamError):
    """No teacher worker answers. The group whose tokens it should judge is run again when one is back."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "TEACHER_AWAY"


class TeacherFailed(SlipstreamError):
    """The teacher failed over this, alone and more than once, or said nothing but NaN; it goes on with other calls.

    Do not repeat it.
    """

    code = grpc.StatusCode.INTERNAL
    reason = "TEACHER_FAILED"


# --- Orchestrator ------------------------------------------------------------------------------------


class RunnerSuperseded(SlipstreamError):
    """A later process runs under this runner_id: `metadata["epoch"]`. End."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "RUNNER_SUPERSEDED"


class EnvironmentUnknown(SlipstreamError):
    """No environment of this name is configured; `metadata["known"]` lists those there are."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "ENVIRONMENT_UNKNOWN"


class RolloutUnknown(SlipstreamError):
    """This group was never created, or is no longer kept."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "ROLLOUT_UNKNOWN"


class RolloutQueueFull(SlipstreamError):
    """`metadata["limit"]` groups of third parties wait or run already. Back off and retry."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "ROLLOUT_QUEUE_FULL"


class SessionUnknown(SlipstreamError):
    """This session was never opened, is no longer kept, or is not at this runner."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "SESSION_UNKNOWN"


class SessionEnded(SlipstreamError):
    """The session takes no more turns; `metadata["session_reason"]` says why. Open another."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "SESSION_ENDED"


class SessionKeyLost(SlipstreamError):
    """This request opened a session before, and the secret its key is made from, in `metadata["path"]`, has changed."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "SESSION_KEY_LOST"


class SessionLimitReached(SlipstreamError):
    """The session has all that one may have of `metadata["name"]`, a setting: close it, or ask for less."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "SESSION_LIMIT_REACHED"


class SessionsFull(SlipstreamError):
    """`metadata["limit"]` sessions are open already, or no admission slot came in time. Back off and retry."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "SESSIONS_FULL"


class SessionBusy(SlipstreamError):
    """`metadata["limit"]` turns of this session run already. Wait for one of them."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "SESSION_BUSY"


class GatewayAbsent(SlipstreamError):
    """The run has no gateway, so nothing could drive a session. Start it with `gateway.enabled`."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "GATEWAY_ABSENT"


class RunEnded(SlipstreamError):
    """The run has ended and takes no more work; `metadata["state"]` says how."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "RUN_ENDED"


class StepNotNext(SlipstreamError):
    """The step is neither sealed nor the next to be: `metadata["next_step"]` is."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STEP_NOT_NEXT"


class StepNotSealed(SlipstreamError):
    """No plan of this step was given out: `metadata["sealed_step"]` is the newest."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STEP_NOT_SEALED"


class IncarnationSuperseded(SlipstreamError):
    """A later restore of the trainer took over: `metadata["incarnation"]`. End."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "INCARNATION_SUPERSEDED"


class JournalCorrupt(SlipstreamError):
    """Record `metadata["record"]` of the journal does not check out: the file was changed. Restore it from a copy."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "JOURNAL_CORRUPT"


# --- Engine ------------------------------------------------------------------------------------------


class ContextTooLong(SlipstreamError):
    """Prompt and answer do not fit `metadata["limit"]` tokens, the limit of `metadata["name"]`. Ask for less."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "CONTEXT_TOO_LONG"


class SamplingBiased(SlipstreamError):
    """`metadata["field"]` cuts tokens off in a rollout that is to train. Leave it out, or do not train on it."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "SAMPLING_BIASED"


class EngineFull(SlipstreamError):
    """`metadata["limit"]` requests wait already. Back off, or place elsewhere."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "ENGINE_FULL"


class NoWeights(SlipstreamError):
    """The engine has no weights yet. Wait for its first update."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "NO_WEIGHTS"


class RequestAborted(SlipstreamError):
    """The request was aborted before it had a result. Start over if it is still wanted."""

    code = grpc.StatusCode.ABORTED
    reason = "REQUEST_ABORTED"


class KvUnknown(SlipstreamError):
    """This KV was released, expired, or never was: `metadata["transfer_id"]`. Prefill again."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "KV_UNKNOWN"


class KvMismatch(SlipstreamError):
    """The KV sent is not of this prompt, salt and model, or not of this run: `metadata["field"]`. Prefill again."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "KV_MISMATCH"


class RoutesUnknown(SlipstreamError):
    """No routes under this key: released, or dropped at the byte bound. Train with live routes."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "ROUTES_UNKNOWN"


# --- Workers and broadcaster -------------------------------------------------------------------------


class WorkerStale(SlipstreamError):
    """The worker is of another epoch, serves an older version than asked, or failed an update. Place again."""

    code = grpc.StatusCode.ABORTED
    reason = "WORKER_STALE"


class KvTransferFailed(SlipstreamError):
    """The prefill worker in `metadata["address"]` did not deliver the prompt's KV. Prefill again."""

    code = grpc.StatusCode.ABORTED
    reason = "KV_TRANSFER_FAILED"


class PrefixUnknown(SlipstreamError):
    """The base of the prompt is not held here. Send all tokens."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "PREFIX_UNKNOWN"


class UpdateInProgress(SlipstreamError):
    """`metadata["holder"]` updates this worker to `metadata["version"]`. Wait for it, or for its lease to end."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "UPDATE_IN_PROGRESS"


class UpdateNotOpen(SlipstreamError):
    """No such update is open, or its lease ran out before the swap; the old version goes on. Begin again."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "UPDATE_NOT_OPEN"


class NotGroupLeader(SlipstreamError):
    """This worker does not lead its data-parallel group, or is in none. Update `metadata["leader"]`."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "NOT_GROUP_LEADER"


class GroupVetoed(SlipstreamError):
    """Another rank of the group could not take the update: the old weights are back and serve. Begin again."""

    code = grpc.StatusCode.ABORTED
    reason = "GROUP_VETOED"


class GroupSplit(SlipstreamError):
    """Ranks of one group may have different weights: it is unroutable until the whole of it is updated. Begin again."""

    code = grpc.StatusCode.ABORTED
    reason = "GROUP_SPLIT"


class VersionNotNewer(SlipstreamError):
    """`metadata["newest"]` is there already, and versions only move forward. Do not retry."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "VERSION_NOT_NEWER"


class WeightVersionUnknown(SlipstreamError):
    """This version was never sealed, or it is pruned. Ask for the newest."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "WEIGHT_VERSION_UNKNOWN"


class WeightsCorrupt(SlipstreamError):
    """Weights differ from what the manifest says: `metadata["slice"]`. Fetch or send them again."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "WEIGHTS_CORRUPT"


class ProbeFailed(SlipstreamError):
    """The engine's log-probabilities of the probe differ from the trainer's: `metadata["max_abs_error"]`."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "PROBE_FAILED"


class VersionSealed(SlipstreamError):
    """This version is sealed, and a sealed version never changes. Publish another."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "VERSION_SEALED"


class VersionNotOpen(SlipstreamError):
    """This version is not open for publishing. Open it first."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "VERSION_NOT_OPEN"


class ShardsMissing(SlipstreamError):
    """The ranks in `metadata["missing_ranks"]` have not published. Seal when they have."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "SHARDS_MISSING"


class SliceUnknown(SlipstreamError):
    """The manifest has no slice of this index: `metadata["slice_index"]`. Read the manifest."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "SLICE_UNKNOWN"


class BroadcastStoreFull(SlipstreamError):
    """The store holds `metadata["limit_bytes"]` at most. Publish again when versions were pruned."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "BROADCAST_STORE_FULL"


class CheckpointFailed(SlipstreamError):
    """A checkpoint could not be written or read; those before it stand. Look at the trainer's log, and call again."""

    code = grpc.StatusCode.ABORTED
    reason = "CHECKPOINT_FAILED"


# --- Sandbox -----------------------------------------------------------------------------------------


class SandboxUnknown(SlipstreamError):
    """The sandbox expired, was deleted, or belonged to an executor that is gone. Create a new one."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "SANDBOX_UNKNOWN"


class RootfsUnknown(SlipstreamError):
    """This executor has no root file system of that name: `metadata["known"]`. GetCapacity lists them."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "ROOTFS_UNKNOWN"


class SandboxFileUnknown(SlipstreamError):
    """The sandbox has no file at `metadata["path"]`. Write it first."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "SANDBOX_FILE_UNKNOWN"


class SandboxFilesFull(SlipstreamError):
    """A sandbox holds `metadata["limit"]` `metadata["unit"]` of files at most. Write less."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "SANDBOX_FILES_FULL"


class SandboxesFull(SlipstreamError):
    """`metadata["limit"]` sandboxes are open. Use another executor, or wait."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "SANDBOXES_FULL"


class SandboxQueueFull(SlipstreamError):
    """`metadata["limit"]` programs wait already. Back off, or use another executor."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "SANDBOX_QUEUE_FULL"


class SandboxBroken(SlipstreamError):
    """The executor cannot make a jail on this machine. Use another; its log says why."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "SANDBOX_BROKEN"


# --- Boundary ----------------------------------------------------------------------------------------

# What a status without our ErrorInfo is taken for: it comes from grpc itself, not from a handler.
_BY_CODE: dict[grpc.StatusCode, type[SlipstreamError]] = {
    grpc.StatusCode.UNAVAILABLE: Unreachable,
    grpc.StatusCode.CANCELLED: Unreachable,  # not by the caller: the server let it go by, having too many, or ending
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
}
_RETRYABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


def to_status(error: SlipstreamError, retry_delay_ms: int = RETRY_DELAY_MS) -> status_pb2.Status:
    """The status of `error`: one ErrorInfo, and RetryInfo where the same call may succeed later."""
    details = [any_pb2.Any(), any_pb2.Any()]
    metadata = {key: _cut(value, MAX_METADATA_CHARS) for key, value in error.metadata.items()}
    details[0].Pack(error_details_pb2.ErrorInfo(domain=DOMAIN, reason=error.reason, metadata=metadata))
    if error.code in _RETRYABLE:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(retry_delay_ms)
        details[1].Pack(retry)
    else:
        details.pop()
    return status_pb2.Status(code=error.code.value[0], message=_cut(error.message, MAX_MESSAGE_CHARS), details=details)


def _cut(text: str, max_chars: int) -> str:
    """`text`, its middle left out where it is too long; what is no ASCII counts as it travels, nine for one."""
    if len(text) + 8 * sum(not character.isascii() for character in text) <= max_chars:
        return text
    kept = text if text.isascii() else ascii(text)[1:-1]
    return kept if len(kept) <= max_chars else f"{kept[: max_chars // 2]} ... {kept[-max_chars // 3 :]}"


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: SlipstreamError) -> None:
    """End the call with the status of `error`. Raises, as every abort does."""
    status: Any = rpc_status.to_status(to_status(error))  # pyright: ignore[reportUnknownMemberType]
    try:
        await context.abort(status.code, status.details, status.trailing_metadata)
    except grpc.aio.InternalError as failed:  # a message the client does not take is in the way of the status
        log.info("status_not_sent", reason=error.reason, detail=str(failed))
        raise asyncio.CancelledError from None


@asynccontextmanager
async def rpc_boundary(context: grpc.aio.ServicerContext[Any, Any], **fields: object) -> AsyncGenerator[None, None]:
    """Turn whatever escapes a handler into a status, once. `fields` go on its log line."""
    try:
        yield
    except Exception as error:
        await refuse(context, error, **fields)


async def refuse(context: grpc.aio.ServicerContext[Any, Any], error: Exception, **fields: object) -> None:
    """End the call with what `error` means to the caller; an unexpected one stays in our log."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.InternalError):  # the connection broke under a message
        log.info("client_gone", **fields)
        raise asyncio.CancelledError from None
    if isinstance(error, grpc.aio.AioRpcError):  # from a peer: its reason travels on
        error = from_rpc_error(error)
    if isinstance(error, SlipstreamError):
        log.info("rpc_refused", reason=error.reason, metadata=error.metadata, detail=error.message, **fields)
        await abort(context, error)
    log.error("rpc_failed", exc_info=error, **fields)
    await abort(context, InternalError("internal error"))


def from_rpc_error(error: grpc.RpcError) -> SlipstreamError:
    """The error the server raised, in the same class, from the status a call ended with.

    Works for the asyncio and the blocking client. A status from grpc itself becomes the class of its code.
    """
    call: Any = error
    code: grpc.StatusCode = call.code()
    info = _error_info(call.trailing_metadata() or ())
    message = call.details() or code.name
    if info is None:
        return _BY_CODE.get(code, SlipstreamError)(message, grpc_code=code.name)
    cls = SlipstreamError.by_reason.get(info.reason)
    if cls is None:  # a newer server's reason: keep what can be kept
        return _BY_CODE.get(code, SlipstreamError)(message, **{**info.metadata, "unknown_reason": info.reason})
    rebuilt = cls(message)
    rebuilt.metadata = dict(info.metadata)
    return rebuilt


@contextmanager
def rpc_errors() -> Generator[None, None, None]:
    """Raise what the server raised: `with rpc_errors(): await stub.Place(...)`."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def _error_info(trailing_metadata: Any) -> error_details_pb2.ErrorInfo | None:
    for key, value in trailing_metadata:
        if key != STATUS_KEY:
            continue
        try:
            status = status_pb2.Status.FromString(value)
        except DecodeError:
            return None
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info) and info.domain == DOMAIN:
                return info
    return None
