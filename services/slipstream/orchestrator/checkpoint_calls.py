"""Calls for a checkpoint: the trainer hears of them when it asks for a plan, and says there what it has written."""

from __future__ import annotations

import asyncio

from slipstream.api.run.v1 import run_pb2
from slipstream.common.errors import DeadlineExceeded, RunEnded, Unsupported
from slipstream.common.version import PolicyVersion
from slipstream.orchestrator.run_state import RunState
from slipstream.orchestrator.signals import Signal

MAX_WAIT_S = 590.0
"""Within the cap of every call."""
LOOK_S = 1.0


class CheckpointCalls:
    """Who waits, and the newest checkpoint that the trainer told of."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._heard = Signal()
        self._writes: bool | None = None
        self._newest: PolicyVersion | None = None
        self._wanted_step = -1

    def heard(self, incarnation: int, step: int | None) -> None:
        """A trainer of this incarnation asked for a plan; its newest checkpoint is of `step`, or it writes none."""
        self._writes = step is not None
        # One that it was restored from has the name that it was written under.
        if step is not None and (self._newest is None or step > self._newest.step):
            self._newest = PolicyVersion(incarnation, step)
        self._heard.notify()

    @property
    def due(self) -> bool:
        """Whether the trainer is to write one."""
        return self._newest is not None and self._newest.step < self._wanted_step

    async def wait(self, trained_step: int, timeout_s: float) -> PolicyVersion:
        """The newest checkpoint, once it covers `trained_step`.

        Raises `Unsupported`, `RunEnded`, and `DeadlineExceeded`.
        """
        self._wanted_step = max(self._wanted_step, trained_step)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + min(timeout_s, MAX_WAIT_S)
        while not self._covers(trained_step):
            if self._writes is False:
                raise Unsupported("this run writes no checkpoints", method="SaveCheckpoint")
            if self._state.ended:
                name = run_pb2.RunState.Name(self._state.state)
                raise RunEnded(f"the run has ended ({self._state.reason}), and its trainer with it", state=name)
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                raise DeadlineExceeded(f"no checkpoint covers step {trained_step} yet")
            await self._heard.wait(min(LOOK_S, left_s))  # the end of the run is not heard here
        assert self._newest is not None
        return self._newest

    def _covers(self, step: int) -> bool:
        return self._newest is not None and self._newest.step >= step
