"""Which requests a worker takes, and how many it has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager

from slipstream.api.types.v1 import types_pb2
from slipstream.common.errors import Draining, WorkerStale
from slipstream.common.version import PolicyVersion
from slipstream.engine.worker.identity import WorkerIdentity
from slipstream.engine.worker.salts import Salts
from slipstream.engine.worker.updates import WorkerState, WorkerUpdates


class WorkerGate:
    """Holds the salt invariant at the worker: a request never runs on weights older than its dispatch version.

    The epoch check closes the gap between Place and the request: a worker that restarted meanwhile may serve other
    weights and holds none of the KV it was chosen for.
    """

    def __init__(
        self, identity: WorkerIdentity, updates: WorkerUpdates, salts: Salts, silent_s: Callable[[], float]
    ) -> None:
        self._identity = identity
        self._silent_s = silent_s
        self._updates = updates
        self.salts = salts
        self._idle = asyncio.Event()
        self._idle.set()
        self.active = 0
        self.draining = False

    @contextmanager
    def admitted(
        self, worker_epoch: str, min_version: types_pb2.PolicyVersion, salt: str
    ) -> Generator[None, None, None]:
        """Check a request and count it while it runs."""
        version = PolicyVersion.from_proto(min_version)
        self._check(worker_epoch, version)
        self.salts.see(salt, version)
        self.active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            if not self.active:
                self._idle.set()

    def check_epoch(self, worker_epoch: str) -> None:
        """Raise `WorkerStale` if the caller means an earlier life of this worker. Empty means any."""
        if worker_epoch and worker_epoch != self._identity.epoch:
            raise WorkerStale("this worker was started again", epoch=self._identity.epoch)

    async def drain(self) -> None:
        """Refuse what comes and return when nothing runs."""
        self.draining = True
        await self._idle.wait()

    def _check(self, worker_epoch: str, min_version: PolicyVersion) -> None:
        if self.draining:
            raise Draining("this worker is stopping")
        self.check_epoch(worker_epoch)
        updates = self._updates
        if updates.state is not WorkerState.SERVING:
            raise WorkerStale(updates.stale_reason or "no weights yet", state=updates.state.value)
        if silent_s := self._silent_s():
            raise WorkerStale(f"its engine has not moved for {silent_s:.0f} s", state="silent")
        if updates.version < min_version:
            raise WorkerStale(f"{updates.version} is served, {min_version} is asked", version=updates.version)
