"""What code of environments may raise: the end of its own rollouts, never of the process that runs it."""

from __future__ import annotations

import asyncio

import grpc

from slipstream.common.errors import SlipstreamError

RAISED = (Exception, SystemExit, asyncio.CancelledError)
"""Not only `Exception`: a library may call `sys.exit`, and a task that it cancelled raises in whoever awaits it."""
MAX_TOLD_CHARACTERS = 4096


def given_up(error: BaseException) -> bool:
    """Whether the present task was cancelled by us, so that what it raised is no failure of the environment's."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def away(error: BaseException) -> bool:
    """Whether it comes of a service that is away, which says nothing of the environment."""
    cause: BaseException | None = error
    for _ in range(16):
        if cause is None:
            break
        if isinstance(cause, SlipstreamError):
            return cause.code is grpc.StatusCode.UNAVAILABLE
        cause = cause.__cause__ or cause.__context__
    return False


def told(error: BaseException) -> str:
    """One sentence for the rollout's record, bounded, also of an error that cannot say what it is."""
    try:
        said = str(error)
    except Exception as worse:
        said = f"its text raises {type(worse).__name__}"
    return f"{type(error).__name__}: {said}"[:MAX_TOLD_CHARACTERS]
