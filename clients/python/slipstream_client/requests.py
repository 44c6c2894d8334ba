"""Requests made of plain arguments, for both kinds of client."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import uuid4

from slipstream.api.rollout.v1 import rollout_pb2
from slipstream_client.errors import InvalidRequest
from slipstream_client.rollout import Sampling

Labels = Mapping[str, str]


def check_text(**fields: str | None) -> None:
    """Raise `InvalidRequest` for what cannot travel, by the name of its argument."""
    for name, text in fields.items():
        try:
            (text or "").encode()
        except UnicodeEncodeError as error:
            metadata = {"field": name, "rule": "string.utf8"}
            message = f"{name} is no text: half of a surrogate pair stands at position {error.start}"
            raise InvalidRequest(message, metadata=metadata) from None


def _check_labels(labels: Labels | None) -> None:
    for key, value in (labels or {}).items():
        check_text(labels=key)
        check_text(labels=value)


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
    """A group of a task or of a prompt. Raises `ValueError` unless it is one of them, `InvalidRequest` for no text."""
    if (environment is None) == (prompt is None):
        raise ValueError("give an environment, whose task is run, or a prompt of your own")
    check_text(environment=environment, split=split, prompt=prompt, request_id=request_id)
    _check_labels(labels)
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


def get_request(group_id: str) -> rollout_pb2.GetRolloutRequest:
    check_text(group_id=group_id)
    return rollout_pb2.GetRolloutRequest(group_id=group_id)


def cancel_request(group_id: str) -> rollout_pb2.CancelRolloutRequest:
    check_text(group_id=group_id)
    return rollout_pb2.CancelRolloutRequest(request_id=str(uuid4()), group_id=group_id)


def list_request(page_size: int, page_token: str, labels: Labels | None) -> rollout_pb2.ListRolloutsRequest:
    check_text(page_token=page_token)
    return rollout_pb2.ListRolloutsRequest(page_size=page_size, page_token=page_token, filter=label_filter(labels))


def watch_request(after_sequence: int, group_id: str, labels: Labels | None) -> rollout_pb2.WatchRolloutsRequest:
    check_text(group_id=group_id)
    return rollout_pb2.WatchRolloutsRequest(
        after_sequence=after_sequence, group_id=group_id, filter=label_filter(labels)
    )


def label_filter(labels: Labels | None) -> rollout_pb2.LabelFilter | None:
    """None shows all. Raises `InvalidRequest` for what is no text."""
    _check_labels(labels)
    return rollout_pb2.LabelFilter(labels=labels) if labels else None
