"""Takes records to the trackers without ever waiting for one.

Each has a thread and a bounded queue. A tracker that hangs fills its queue, and what comes then is dropped; one that
raises loses the record. Both are counted and said once. At the end each has so many seconds for what is left; its
thread is a daemon, and the process leaves without waiting for whatever its library started (`leave`).
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, Full, Queue

import structlog
from prometheus_client import Counter

from slipstream.common.config import ConfigError
from slipstream.orchestrator.tracking.config import AnyTracker
from slipstream.orchestrator.tracking.figures import Point, point_of
from slipstream.orchestrator.tracking.trackers import TrackedRun, Tracker, open_tracker

log = structlog.get_logger()

_LOOK_S = 0.2
"""How often a thread without records looks whether the run has ended."""

Open = Callable[[AnyTracker, TrackedRun], Tracker]

_lost = Counter(
    "slipstream_orchestrator_tracking_lost",
    "Records that a tracker did not take, by tracker and reason: dropped (it was too slow), failed (it raised).",
    ["tracker", "reason"],
)


def require_libraries(trackers: Sequence[AnyTracker], where: str = "tracking") -> None:
    """Raise `ConfigError` for the first tracker whose library is not installed."""
    for index, tracker in enumerate(trackers):
        if importlib.util.find_spec(tracker.MODULE) is None:
            raise ConfigError(
                f"{where}.{index}: {tracker.type} is not installed: pip install 'slipstream[{tracker.MODULE}]'"
            )


class TrackerFeed:
    """All trackers of a run."""

    def __init__(self, trackers: Sequence[AnyTracker], run: TrackedRun, open_: Open = open_tracker) -> None:
        """Starts a thread each. Raises `ConfigError` where a library is missing."""
        require_libraries(trackers)
        self._lines = [_Line(config, run, open_) for config in trackers]

    def take(self, record: Mapping[str, object]) -> None:
        """A record of `metrics.jsonl`. Never waits."""
        point = point_of(record) if self._lines else None
        if point is not None:
            for line in self._lines:
                line.put(point)

    def finish(self) -> None:
        """Wait for what is on its way, each tracker within its own time and all at once. A repeat waits no longer."""
        for line in self._lines:
            line.end()
        for line in self._lines:
            line.join()
        self._lines = []


class _Line:
    """One tracker's queue and thread."""

    def __init__(self, config: AnyTracker, run: TrackedRun, open_: Open) -> None:
        self._config, self._run, self._open = config, run, open_
        self._queue: Queue[Point] = Queue(config.queue_records)
        self._lost: dict[str, int] = {"dropped": 0, "failed": 0}
        self._ending = threading.Event()
        self._deadline_s = 0.0
        self._thread = threading.Thread(target=self._work, name=f"tracking-{config.type}", daemon=True)
        self._thread.start()

    def put(self, point: Point) -> None:
        try:
            self._queue.put_nowait(point)
        except Full:
            self._lose("dropped", "its queue is full")

    def end(self) -> None:
        """No more will come."""
        if not self._ending.is_set():
            self._deadline_s = time.monotonic() + self._config.finish_timeout_s
            self._ending.set()

    def join(self) -> None:
        self._thread.join(max(0.0, self._deadline_s - time.monotonic()))
        if self._thread.is_alive():
            log.warning("tracker_cut_off", tracker=self._config.type, waiting=self._queue.qsize())
        elif any(self._lost.values()):
            log.warning("tracker_lost_records", tracker=self._config.type, **self._lost)

    def _work(self) -> None:
        tracker: Tracker | None = None
        while (point := self._next()) is not None:
            try:
                tracker = tracker or self._open(self._config, self._run)
                tracker.log(point)
            except Exception as error:  # a third party's library
                self._lose("failed", f"{type(error).__name__}: {error}")
        try:
            if tracker is not None:
                tracker.close()
        except Exception as error:
            log.warning("tracker_not_closed", tracker=self._config.type, error=f"{type(error).__name__}: {error}")

    def _next(self) -> Point | None:
        """The next record; None once there will be no more."""
        while True:
            ending = self._ending.is_set()  # before the look: what was put before it was set is still taken
            try:
                return self._queue.get(timeout=_LOOK_S)
            except Empty:
                if ending:
                    return None

    def _lose(self, reason: str, why: str) -> None:
        self._lost[reason] += 1
        _lost.labels(self._config.type, reason).inc()
        if self._lost[reason] == 1:
            log.warning("tracker_lost_record", tracker=self._config.type, reason=reason, why=why[:400])
