"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` and a status."""

from __future__ import annotations

from typing import Any

import grpc

from slipstream.common import errors

INVALID = "invalid_request_error"


class Refusal(Exception):
    """What a client is told instead of an answer."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, kind: str = INVALID
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind

    def as_json(self) -> dict[str, Any]:
        """The body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def unsupported(param: str, message: str) -> Refusal:
    """A field, or a value of it, that there is no way to honour."""
    return Refusal(400, f"{param}: {message}", code="unsupported_value", param=param)


def wrong_key() -> Refusal:
    """No session has it."""
    return Refusal(
        401, "no session has this key: it is the one that OpenSession answered", code="invalid_api_key", kind=INVALID
    )


PARAMS = {"max_new_tokens": "max_tokens", "prompt": "messages"}
"""Fields as a client of the gateway knows them."""


ENDINGS = {
    "CLOSED": "it was closed with its reward",
    "TRAINED": "a step was trained on it",
    "DISCARDED": "it was closed without a reward",
    "IDLE_TIMEOUT": "nothing was asked of it for longer than its idle timeout",
    "TIMED_OUT": "it ran into one of its timeouts",
    "DEADLINE": "it took longer than its total timeout",
    "AGED_OUT": "the policy has moved too many steps since it was opened (orchestrator.max_off_policy_steps)",
    "RUNNER_LOST": "its runner is gone, and with it its conversation",
    "TURNS_LOST": "its runner was started again, and cannot read all of its turns",
    "NO_TURNS": "it was closed before anything was sampled",
    "NO_VARIANCE": "the rewards of its group do not differ, so that there is nothing to learn",
    "NO_SESSION_CLOSED": "no member of its group was closed with a reward",
    "TOO_FEW_MEMBERS": "too few members of its group were closed with a reward",
    "GROUP_ENDED": "its group has ended",
    "RUN_COMPLETE": "the run needs no more of them",
    "RUN_STOPPED": "the run was stopped",
    "RUN_FINISHED": "the run has finished",
    "RUN_FAILED": "the run has failed",
}
"""What the reasons of a session's end mean."""


def ended(reason: str) -> Refusal:
    """The session takes no more requests."""
    why = ENDINGS.get(reason, "its group was given up")
    return Refusal(410, f"the session has ended: {why} ({reason}); open another", code="session_ended")


def refusal_of(error: errors.SlipstreamError) -> Refusal:
    """What a failure behind the gateway is for its client.

    Clients repeat what is answered with 408, 409, 429 and 5xx: what no repeat heals is none of these.
    """
    param = error.metadata.get("field") or error.metadata.get("name")
    param = PARAMS.get(param, param) if param else None
    code = error.reason.lower()
    match error:
        case errors.SessionUnknown():
            return wrong_key()
        case errors.SessionEnded():
            return ended(error.metadata.get("session_reason", "GROUP_ENDED"))
        case errors.ContextTooLong():
            return Refusal(400, error.message, code="context_length_exceeded", param=param)
        case errors.SessionLimitReached() | errors.EnvironmentTimeout():  # who repeated it would end the next process
            return Refusal(400, error.message, code=code)
        case errors.SamplingBiased():
            return Refusal(400, error.message, code="unsupported_value", param=param)
        case errors.InvalidRequest() | errors.Unsupported():
            return Refusal(400, error.message, code=code, param=param)
        case errors.DeadlineExceeded():
            return Refusal(504, error.message, code=code, kind="server_error")
        case _ if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Refusal(429, error.message, code=code, kind="rate_limit_error")
        case _ if error.code is grpc.StatusCode.UNAVAILABLE:
            return Refusal(503, error.message, code=code, kind="server_error")
        case _:
            return Refusal(500, error.message, code=code, kind="server_error")
