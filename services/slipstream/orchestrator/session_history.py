"""Sessions in the journal: each change of one is a record of kind `session`, with all of it as it is from then on.

It comes before the record of what became of its group, so that a process that dies between both never has a session
that waits for nothing. Of a session's key the journal has the hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.api.rollout.v1 import rollout_pb2
from slipstream.api.types.v1 import types_pb2

OVER = (rollout_pb2.SESSION_STATE_TRAINED, rollout_pb2.SESSION_STATE_ENDED)
"""A session in these states changes no more."""


@dataclass(frozen=True, slots=True)
class Asked:
    """By which request a session was opened: whoever repeats that hears of the same session."""

    request_id: str = ""
    digest: bytes = b""
    """Of its body, but for how long it waits."""
    nonce: bytes = b""
    """What the key was made from, with the run's secret."""

    def as_record(self) -> dict[str, str]:
        """Fields of a session's record."""
        return {"request_id": self.request_id, "digest": self.digest.hex(), "nonce": self.nonce.hex()}


def asked_by(request: rollout_pb2.OpenSessionRequest, nonce: bytes = b"") -> Asked:
    """What is kept of a request."""
    body = rollout_pb2.OpenSessionRequest()
    body.CopyFrom(request)
    body.wait_ms = 0
    digest = hashlib.blake2b(body.SerializeToString(deterministic=True), digest_size=16).digest()
    return Asked(request.request_id, digest, nonce)


@dataclass(frozen=True, slots=True)
class KeptSession:
    """A session as an earlier process left it."""

    proto: rollout_pb2.Session
    key_sha256: bytes
    number: int
    attempt: int
    """At its position."""
    address: str
    """Of its runner."""
    sampling: types_pb2.Sampling | None
    """Of its group, where its first member asked for one."""
    asked: Asked

    @property
    def group_name(self) -> str:
        """Of its group."""
        return self.proto.session_id.rpartition("-")[0]

    @property
    def over(self) -> bool:
        """Whether it changes no more."""
        return self.proto.state in OVER

    def as_record(self) -> dict[str, Any]:
        """Fields of the record."""
        return {
            "position": self.proto.position,
            "attempt": self.attempt,
            "session_id": self.proto.session_id,
            "number": self.number,
            "key": self.key_sha256.hex(),
            "address": self.address,
            "session": _packed(self.proto),
            **self.asked.as_record(),
            **({"sampling": _packed(self.sampling)} if self.sampling is not None else {}),
        }


def session_of(record: Mapping[str, Any]) -> KeptSession:
    """What a record says. Raises `ValueError` and `KeyError`."""
    sampling = record.get("sampling")
    return KeptSession(
        rollout_pb2.Session.FromString(base64.b64decode(record["session"])),
        bytes.fromhex(record["key"]),
        record["number"],
        record["attempt"],
        record["address"],
        None if sampling is None else types_pb2.Sampling.FromString(base64.b64decode(sampling)),
        Asked(record["request_id"], bytes.fromhex(record["digest"]), bytes.fromhex(record["nonce"])),
    )


def _packed(message: rollout_pb2.Session | types_pb2.Sampling) -> str:
    return base64.b64encode(message.SerializeToString()).decode()
