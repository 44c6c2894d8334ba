"""Requests about sessions made of plain arguments, for both kinds of client."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import uuid4

from slipstream.api.rollout.v1 import rollout_pb2
from slipstream_client.requests import Labels, check_text, label_filter
from slipstream_client.rollout import Sampling

OPEN_WAIT_S = 20.0
"""Longest time that the server is asked to wait for a slot, before it is asked again."""
OPEN_SLACK_S = 2.0
"""Part of a call's time that its way may take."""


def open_request(
    *,
    group_key: str,
    group_size: int,
    sampling: Sampling | None,
    idle_timeout_s: float | None,
    total_timeout_s: float | None,
    labels: Labels | None,
    request_id: str | None,
) -> rollout_pb2.OpenSessionRequest:
    """Raises `InvalidRequest` for what is no text."""
    check_text(group_key=group_key, request_id=request_id)
    label_filter(labels)
    return rollout_pb2.OpenSessionRequest(
        request_id=request_id or str(uuid4()),
        group_key=group_key,
        group_size=group_size,
        sampling=None if sampling is None else sampling.to_proto(),
        idle_timeout_ms=round((idle_timeout_s or 0) * 1000),
        total_timeout_ms=round((total_timeout_s or 0) * 1000),
        labels=labels,
    )


def close_request(
    session_id: str, reward: float | None, advantage: float | None, *, discard: bool
) -> rollout_pb2.CloseSessionRequest:
    check_text(session_id=session_id)
    for name, value in {"reward": reward, "advantage": advantage}.items():
        if isinstance(value, Mapping):
            raise TypeError(f"{name}: a session is one agent, with one of it; of several, open a session for each")
    if reward is None and not discard:
        raise ValueError("reward: a session is closed with one, or with discard=True")
    return rollout_pb2.CloseSessionRequest(
        request_id=str(uuid4()), session_id=session_id, reward=reward or 0.0, advantage=advantage, discard=discard
    )


def get_session_request(session_id: str) -> rollout_pb2.GetSessionRequest:
    check_text(session_id=session_id)
    return rollout_pb2.GetSessionRequest(session_id=session_id)


def list_sessions_request(page_size: int, page_token: str, labels: Labels | None) -> rollout_pb2.ListSessionsRequest:
    return rollout_pb2.ListSessionsRequest(page_size=page_size, page_token=page_token, filter=label_filter(labels))


def wait_ms(left_s: float) -> int:
    """How long the server is to wait in a call that has so much time."""
    return max(0, int(min(OPEN_WAIT_S, left_s - OPEN_SLACK_S) * 1000))
