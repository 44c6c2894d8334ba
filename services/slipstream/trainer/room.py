"""Writing files on a disk that may be full: on the torch thread, where waiting holds up nobody."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from slipstream.common.disk import RETRY_S
from slipstream.common.errors import DiskFull
from slipstream.trainer.status import Status

log = structlog.get_logger()


class Stopped(Exception):
    """The trainer was asked to stop before it had done what it was at."""


def write_when_room(write: Callable[[], None], status: Status) -> None:
    """Call `write` until it finds room; what it replaces stays until then. Raises `Stopped` when told to stop."""
    waiter = object()
    try:
        while True:
            try:
                return write()
            except DiskFull as error:
                if waiter not in status.waiting_for_room:
                    log.warning("waits_for_room", detail=error.message)
                status.waiting_for_room.add(waiter)
                if status.stop.is_set():
                    raise Stopped(error.message) from error
            time.sleep(RETRY_S)
    finally:
        status.waiting_for_room.discard(waiter)
