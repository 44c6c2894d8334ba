"""Members of a group beyond those that it needs: the first that end are taken, the others given up.

Whoever ends late is given up more often, so what is taken is shorter than what the model says: see
docs/environments.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.api.rollout.v1 import runner_pb2


@dataclass
class Spares:
    """Which members of one attempt at a group are taken."""

    needed: int
    taken: set[int] = field(default_factory=set[int])
    """Indexes, at most `needed`."""
    token_count: int = 0
    """Tokens drawn for those that were given up, as far as they came."""

    def ended(self, index: int) -> None:
        """A member has come to its end; too late, if enough had."""
        if not self.enough:
            self.taken.add(index)

    @property
    def enough(self) -> bool:
        """Whether the others are to be given up."""
        return len(self.taken) >= self.needed

    def gives_up(self, index: int) -> bool:
        """Whether this one is not wanted any more."""
        return self.enough and index not in self.taken


def spares_of(assignment: runner_pb2.GroupAssignment) -> Spares | None:
    """None where all members are taken."""
    needed = assignment.needed_count
    return Spares(needed) if 0 < needed < assignment.sample_count else None
