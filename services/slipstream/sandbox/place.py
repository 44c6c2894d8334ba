"""A place: one thread that runs one program at a time, under a user, mounts and a cgroup of its own.

As root the thread stages the root, enters its cgroup, then gives up every right for good. It must live as long as the
executor: the kernel kills what it started when it, not the process, ends.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from slipstream.sandbox import kernel
from slipstream.sandbox.cgroup import PlaceGroup
from slipstream.sandbox.jail import Bubblewrap, Jail, SystemTree, bind_arguments
from slipstream.sandbox.program import Ended, KillSwitch, Output, Program
from slipstream.sandbox.staging import stage
from slipstream.sandbox.supervisor import Supervision
from slipstream.sandbox.warden import Warden

log = structlog.get_logger()

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
NOBODY = 65534


@dataclass(frozen=True)
class Job:
    """A program and whom to tell of its output and its end; all three are called on the place's thread."""

    program: Program
    kill: KillSwitch
    output: Output
    on_end: Callable[[Ended | Exception], None]


class Place:
    """One thread; `start` it, give it jobs one after another, `stop` it."""

    def __init__(
        self,
        index: int,
        tree: SystemTree,
        bubblewrap: Bubblewrap,
        group: PlaceGroup | None,
        warden: Warden,
        uid: int | None,
    ) -> None:
        """`uid`: the user to become, where the executor is root; None keeps the executor's."""
        self.own_uid = False
        self._tree = tree
        self._bubblewrap = bubblewrap
        self._group = group
        self._warden = warden
        self._uid = uid
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"place-{index}", daemon=True)

    def start(self) -> None:
        """Returns when the place can take jobs. Blocks for some milliseconds; raises `OSError`."""
        self._thread.start()
        error = self._ready.get(timeout=START_TIMEOUT_S)
        if error is not None:
            raise error

    def submit(self, job: Job) -> None:
        """Hand over a job, when the last one has ended."""
        self._jobs.put(job)

    def stop(self) -> None:
        """End the thread and remove its cgroup. Blocks until its job, whose switch was pulled, has ended."""
        self._jobs.put(None)
        self._thread.join(STOP_TIMEOUT_S)
        if self._group is not None:
            self._group.close()

    def _run(self) -> None:
        try:
            jail = self._settle()
        except OSError as error:
            self._ready.put(error)
            return
        self._ready.put(None)
        while (job := self._jobs.get()) is not None:
            try:
                supervision = Supervision(jail, job.program, self._group, self._warden, job.kill, job.output)
                ended: Ended | Exception = supervision.run()
            except Exception as error:  # a supervised loop: the caller gets it as data
                ended = error
            job.on_end(ended)

    def _settle(self) -> Jail:
        jail = None
        if self._group is not None:
            self._group.enter()
        if self._uid is not None:
            try:
                jail = stage(self._tree, self._bubblewrap)
            except OSError as error:  # root of a container that may not mount
                log.warning("stage_refused", detail=str(error))
            self._become(self._uid)
        if jail is None:
            bubblewrap = self._bubblewrap
            binds = tuple(bind_arguments(self._tree))
            jail = Jail(str(bubblewrap.program), binds, self._tree.path, bubblewrap.options)
        return jail

    def _become(self, uid: int) -> None:
        try:
            kernel.become(uid)
        except OSError as error:  # a container that maps few user ids
            log.info("uid_refused", uid=uid, detail=str(error))
            kernel.become(NOBODY)
        self.own_uid = True


def place_uid(base: int, index: int, max_places: int) -> int | None:
    """The user for place `index` of this process, another for each place on the machine; None unless root."""
    if os.geteuid() != 0:
        return None
    return base + os.getpid() % 2**17 * max_places + index
