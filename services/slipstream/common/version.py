"""The policy version: one value, ordered, as domain code sees it."""

from __future__ import annotations

from typing import NamedTuple

from slipstream.api.types.v1 import types_pb2


class PolicyVersion(NamedTuple):
    """One set of policy weights, ordered by incarnation, then step. Written "1.17".

    Incarnations start at 1 and count restores of the trainer; step 0 is the model a run starts from.
    `UNSET` (0.0) means "no version" and is lower than every real one.
    """

    incarnation: int
    step: int

    @classmethod
    def from_proto(cls, message: types_pb2.PolicyVersion) -> PolicyVersion:
        return cls(message.incarnation, message.step)

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """The inverse of `str`."""
        incarnation, dot, step = text.partition(".")
        if not (dot and incarnation.isdecimal() and step.isdecimal()):
            raise ValueError(f"{text!r} is not a policy version such as '1.17'")
        return cls(int(incarnation), int(step))

    def to_proto(self) -> types_pb2.PolicyVersion:
        return types_pb2.PolicyVersion(incarnation=self.incarnation, step=self.step)

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"

    def __bool__(self) -> bool:
        return self.incarnation > 0


UNSET = PolicyVersion(0, 0)
