"""Requests made of plain arguments, for both kinds of client."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import uuid4

from slipstream.api.rollout.v1 import rollout_pb2
from slipstream_client.rollout import Sampling

Labels = Mapping[str, str]


def create_request(
    *,
    environment: str | None,
    split: str,
    index: int,
    prompt: str | None,
    sample_count: int,
    sampling: Sampling | None,
    labels: Labels | None,
    include_tokens: bool,
    request_id: str | None,
) -> rollout_pb2.CreateRolloutRequest:
    """A group of a task or of a prompt. Raises `ValueError` unless it is one of them."""
    if (environment is None) == (prompt is None):
        raise ValueError("give an environment, whose task is run, or a prompt of your own")
    request = rollout_pb2.CreateRolloutRequest(
        request_id=request_id or str(uuid4()),
        sample_count=sample_count,
        sampling=None if sampling is None else sampling.to_proto(),
        labels=labels,
        include_tokens=include_tokens,
    )
    if prompt is not None:
        request.prompt = prompt
    elif environment is not None:
        request.task.CopyFrom(rollout_pb2.TaskRef(environment=environment, split=split, index=index))
    return request


def cancel_request(group_id: str) -> rollout_pb2.CancelRolloutRequest:
    return rollout_pb2.CancelRolloutRequest(request_id=str(uuid4()), group_id=group_id)


def list_request(page_size: int, page_token: str, labels: Labels | None) -> rollout_pb2.ListRolloutsRequest:
    return rollout_pb2.ListRolloutsRequest(page_size=page_size, page_token=page_token, filter=_filter(labels))


def watch_request(after_sequence: int, group_id: str, labels: Labels | None) -> rollout_pb2.WatchRolloutsRequest:
    return rollout_pb2.WatchRolloutsRequest(after_sequence=after_sequence, group_id=group_id, filter=_filter(labels))


def _filter(labels: Labels | None) -> rollout_pb2.LabelFilter | None:
    return rollout_pb2.LabelFilter(labels=labels) if labels else None
