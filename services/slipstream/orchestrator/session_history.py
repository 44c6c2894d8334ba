"""Sessions in the journal: each change of one is a record of kind `session`, with all of it as it is from then on.

It comes before the record of what became of its group, so that a process that dies between both never has a session
that waits for nothing. Of a session's key the journal has the hash.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.api.rollout.v1 import rollout_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.orchestrator.ledger import Asked

OVER = (rollout_pb2.SESSION_STATE_TRAINED, rollout_pb2.SESSION_STATE_ENDED)
"""A session in these states changes no more."""


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
    nonce: bytes
    """What its key was made from, with the run's secret."""

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
            "nonce": self.nonce.hex(),
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
        Asked.of_record(record),
        bytes.fromhex(record["nonce"]),
    )


def _packed(message: rollout_pb2.Session | types_pb2.Sampling) -> str:
    return base64.b64encode(message.SerializeToString()).decode()
