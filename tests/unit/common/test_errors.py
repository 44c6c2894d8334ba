"""The table of reasons."""

from __future__ import annotations

import re

import grpc
import pytest

from slipstream.common.errors import SlipstreamError, StateConflict, from_rpc_error, to_status
from slipstream_client import errors as client_errors


def test_each_class_is_one_reason_documented_and_spelled_alike():
    assert len(SlipstreamError.by_reason) > 10
    for reason, cls in SlipstreamError.by_reason.items():
        assert cls.reason == reason
        assert re.fullmatch(r"[A-Z][A-Z0-9_]*[A-Z0-9]", reason)
        assert isinstance(cls.code, grpc.StatusCode)
        assert cls.code not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)
        assert cls.__doc__
        assert cls.__doc__ != SlipstreamError.__doc__


def test_a_reason_cannot_belong_to_two_classes():
    with pytest.raises(TypeError, match="belongs to StateConflict"):

        class Other(SlipstreamError):
            reason = StateConflict.reason


def test_metadata_is_text():
    assert StateConflict("x", key="a", step=3).metadata == {"key": "a", "step": "3"}


@pytest.mark.parametrize("rebuild", [from_rpc_error, client_errors.from_rpc_error])
def test_a_call_that_the_server_let_go_by_may_be_made_again(rebuild):
    metadata = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, metadata, metadata, "CANCELLED")
    rebuilt = rebuild(error)
    assert (type(rebuilt).__name__, rebuilt.code) == ("Unreachable", grpc.StatusCode.UNAVAILABLE)


def test_only_what_may_be_retried_carries_a_delay():
    for cls in SlipstreamError.by_reason.values():
        retryable = cls.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert len(to_status(cls("x")).details) == (2 if retryable else 1)
