"""First turns of episodes that were cut off at `max_new_tokens`: counted, and said once for each environment.

Such an episode mostly ends there, before its environment has answered anything, and earns what that is worth.
"""

from __future__ import annotations

import structlog

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.runner import telemetry
from slipstream.runner.rollout import LENGTH, Rollout

log = structlog.get_logger()


class CutTurns:
    """Of one runner."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def note(self, assignment: runner_pb2.GroupAssignment, rollout: Rollout) -> None:
        """Look at a rollout's first turn, which has ended. What another limit cut is no news."""
        limit, asked = rollout.turn_limit_tokens, assignment.sampling.max_new_tokens
        if rollout.finish_reason != LENGTH or (limit is not None and limit < asked):
            return
        telemetry.episodes_cut.labels(assignment.environment).inc()
        if assignment.environment not in self._said:
            self._said.add(assignment.environment)
            log.warning(
                "first_turn_cut",
                environment=assignment.environment,
                max_new_tokens=asked,
                hint="raise max_new_tokens of its section if the model is meant to say more; see "
                "slipstream_runner_episodes_cut for how often",
            )
