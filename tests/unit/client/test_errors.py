"""The client's own tables and codecs agree with the server's."""

from __future__ import annotations

import pytest
from google.rpc import error_details_pb2, status_pb2

from slipstream.common.errors import RolloutUnknown, SlipstreamError, to_status
from slipstream_client.client import Client
from slipstream_client.connection import Connection
from slipstream_client.errors import BY_REASON, InvalidRequest
from slipstream_client.status import error_info, status_bytes


def test_every_error_of_the_client_is_one_of_the_server():
    for reason, cls in BY_REASON.items():
        if cls.default_reason == "UNKNOWN":
            continue
        served = SlipstreamError.by_reason[reason]
        assert (cls.__name__, cls.default_code) == (served.__name__, served.code)


@pytest.mark.parametrize(
    ("call", "arguments", "field"),
    [
        ("create_rollout", {"prompt": "\ud800"}, "prompt"),
        ("create_rollout", {"environment": "\ud800"}, "environment"),
        ("create_rollout", {"environment": "e", "split": "a\ud800"}, "split"),
        ("create_rollout", {"prompt": "p", "request_id": "\udfff"}, "request_id"),
        ("create_rollout", {"prompt": "p", "labels": {"\ud800": "x"}}, "labels"),
        ("create_rollout", {"prompt": "p", "labels": {"x": "\ud800"}}, "labels"),
        ("get_rollout", {"group_id": "\ud800"}, "group_id"),
        ("cancel_rollout", {"group_id": "\ud800"}, "group_id"),
    ],
)
def test_what_is_no_text_is_refused_by_the_name_of_its_argument(call, arguments, field):
    with (
        Client(Connection("127.0.0.1:1")) as client,
        pytest.raises(InvalidRequest, match=f"^{field} is no text") as refused,
    ):
        getattr(client, call)(**arguments)
    assert refused.value.metadata == {"field": field, "rule": "string.utf8"}


def test_the_status_of_the_server_is_read_without_generated_classes():
    error = RolloutUnknown("gone", group_id="a" * 200, empty="")
    assert error_info(to_status(error).SerializeToString()) == ("ROLLOUT_UNKNOWN", error.metadata)
    status = status_pb2.Status(code=5)
    status.details.add().Pack(error_details_pb2.ErrorInfo(domain="slipstream", reason="X", metadata={"é": "ß" * 99}))
    assert error_info(status.SerializeToString()) == ("X", {"é": "ß" * 99})
    assert error_info(b"") is None
    assert error_info(b"\x1a\xff\x01x") is None
    assert error_info(b"\xff\xff") is None


def test_other_details_and_other_domains_are_left_alone():
    status = status_pb2.Status(code=5, details=[])
    status.details.add().Pack(error_details_pb2.RetryInfo())
    status.details.add().Pack(error_details_pb2.ErrorInfo(domain="other", reason="X"))
    assert error_info(status.SerializeToString()) is None
    status.details.add().Pack(error_details_pb2.ErrorInfo(domain="slipstream", reason="Y"))
    assert error_info(status.SerializeToString()) == ("Y", {})


def test_the_status_of_the_fake_is_what_google_rpc_defines():
    status = status_pb2.Status.FromString(status_bytes(5, "gone", "ROLLOUT_UNKNOWN", {"group_id": "a" * 300}))
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (status.code, status.message, info.domain, info.reason) == (5, "gone", "slipstream", "ROLLOUT_UNKNOWN")
    assert dict(info.metadata) == {"group_id": "a" * 300}
