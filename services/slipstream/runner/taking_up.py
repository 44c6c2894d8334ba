"""What a runner says and does before it goes on where an earlier process left off: its own, or the orchestrator's.

A restarted runner names the groups that it takes up in its first heartbeat, and begins them once that is answered,
since the answer cancels those that others have by now. Whenever the orchestrator is another process than before, all
finished groups that are held are reported once more: it forgot those that it had not sealed, and what it refuses is
needed no longer. Only then may it take what nobody named for lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import structlog

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.common.disk import RETRY_S
from slipstream.common.errors import TooManyFiles
from slipstream.runner.spool import Spool

log = structlog.get_logger()

MAX_REPORTS_PER_CALL = 256
MAX_REPORT_BYTES = 4 << 20
"""Of one call, and one report more: well below what a message may have."""


class TakingUp:
    """Follows which process of the orchestrator knows what."""

    def __init__(self, spool: Spool, report: Callable[[list[runner_pb2.GroupReport]], Awaitable[None]]) -> None:
        self._spool = spool
        self._report = report
        self._orchestrator_epoch: str | None = None
        self._changed = asyncio.Event()
        self.registered = asyncio.Event()
        """Set once a heartbeat of this process was answered."""
        self.reported_to_epoch = ""
        """The orchestrator's process that has all finished groups which are held."""

    def heard(self, orchestrator_epoch: str) -> None:
        """A heartbeat was answered."""
        if orchestrator_epoch != self._orchestrator_epoch:
            self._orchestrator_epoch = orchestrator_epoch
            self.reported_to_epoch = ""
            self._changed.set()
        self.registered.set()

    async def run(self) -> None:
        """Report all once more to each new process of the orchestrator, for ever."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            epoch, count = self._orchestrator_epoch or "", 0
            try:
                for reports in self._batches():
                    count += len(reports)
                    await self._report(reports)
            except TooManyFiles as error:
                log.warning("reports_wait_to_be_read", detail=error.message)
                await asyncio.sleep(RETRY_S)
                self._changed.set()  # from the start: what was reported is refused, or taken once
                continue
            if epoch == self._orchestrator_epoch:
                self.reported_to_epoch = epoch
                if count:
                    log.info("groups_reported_again", group_count=count, kept_bytes=self._spool.size_bytes)

    def _batches(self) -> Iterator[list[runner_pb2.GroupReport]]:
        batch: list[runner_pb2.GroupReport] = []
        size_bytes = 0
        for report in self._spool.reports():
            batch.append(report)
            size_bytes += report.ByteSize()
            if size_bytes >= MAX_REPORT_BYTES or len(batch) >= MAX_REPORTS_PER_CALL:
                yield batch
                batch, size_bytes = [], 0
        if batch:
            yield batch
