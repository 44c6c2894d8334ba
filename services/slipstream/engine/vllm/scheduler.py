"""vLLM's scheduler, with one addition: while it is paused, probes run, and nothing else.

So new weights are tried by a forward pass of their own before any request goes on with them. vLLM calls its scheduler
interface not public: what is used of it here is covered by the tests of the engine, for the version that is pinned.
"""

# vLLM is not installed where the checks run.
# pyright: reportMissingImports=false
from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler

PROBE_PREFIX = "slipstream-probe/"
"""Requests whose ids begin so run while all others are paused."""


def _probes(requests: Any) -> list[Any]:
    return [request for request in requests if request.request_id.startswith(PROBE_PREFIX)]


class ProbeMixin(Scheduler):
    """Runs probes in a pause."""

    def get_num_unfinished_requests(self) -> int:
        if self._pause_state != PauseState.PAUSED_ALL:
            return super().get_num_unfinished_requests()
        return len(_probes(self.running)) + len(_probes(self.waiting))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._pause_state != PauseState.PAUSED_ALL or not self.get_num_unfinished_requests():
            return super().schedule(*args, **kwargs)
        running, waiting, skipped = self.running, self.waiting, self.skipped_waiting
        probes, queued = _probes(running), _probes(waiting)
        waiting.remove_requests(queued)
        self.running = probes
        self.waiting, self.skipped_waiting = create_request_queue(self.policy), create_request_queue(self.policy)
        for request in queued:
            self.waiting.add_request(request)
        self._pause_state = PauseState.UNPAUSED
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self._pause_state = PauseState.PAUSED_ALL
            scheduled, left = self.running, (*self.waiting, *self.skipped_waiting)
            others = [request for request in running if request not in probes]
            self.running, self.waiting, self.skipped_waiting = others + scheduled, waiting, skipped
            for request in left:
                waiting.add_request(request)
            if not scheduled and others:  # no block is free: the last to come gives its own up, and computes them again
                self.running.remove(others[-1])
                self._preempt_request(others[-1], time.monotonic())
        return output


class ProbeScheduler(ProbeMixin):
    """For executors that run one step at a time: the CPU."""


class AsyncProbeScheduler(ProbeMixin, AsyncScheduler):
    """For executors that schedule ahead."""
