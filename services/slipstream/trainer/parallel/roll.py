"""Which rank is missing when a collective fails: the backend says that a connection broke, not whose rank it was.

    roll = Roll(store, rank, rank_count)
    with roll.watching():          # raises RankLost, with the ranks, within the process group's timeout and 2 seconds
        roll.arrive(place)         # before each micro-batch: a number that only grows
        ...

Every rank writes down where it is, a thread of it that it lives, and at last that a collective failed for it. Of the
ranks that a survivor then reads, those that no longer beat are dead or stopped. If all beat, those that are least far
along are stuck, and if all are equally far, those whose collectives have not failed: they are not in one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import Store

BEAT_S = 0.25
PATIENCE_BEATS = 4
"""Beats that a living rank may miss while it is read."""


SILENT = "does not answer"
STORE_GONE = "is gone, and with it the store"


class RankLost(Exception):
    """A step ended because ranks are dead, stopped or stuck; `ranks` says which, as far as that can be told."""

    def __init__(self, ranks: list[int], why: str) -> None:
        named = "rank " + ", ".join(map(str, ranks)) if ranks else "a rank"
        super().__init__(f"{named} of the trainer {why}")
        self.ranks = ranks
        self.silent = bool(ranks) and why in (SILENT, STORE_GONE)
        """They give no sign; they are not merely behind."""


@dataclass(frozen=True)
class Sign:
    """What a rank has written down."""

    place: int
    beats: int
    failed: bool = False


def lost_ranks(before: Mapping[int, Sign], after: Mapping[int, Sign]) -> tuple[list[int], str]:
    """Who is missing, from what the ranks wrote at two times some beats apart; nobody, where all are equally far."""
    silent = [rank for rank, sign in after.items() if sign.beats == before[rank].beats]
    if silent:
        return silent, SILENT
    last = min(sign.place for sign in after.values())
    behind = [rank for rank, sign in after.items() if sign.place == last]
    if len(behind) == len(after):
        behind = [rank for rank, sign in after.items() if not sign.failed]
    return (behind, "is stuck") if behind else ([], "failed")


class Roll:
    """The signs of all ranks, in the store that they met in."""

    def __init__(self, store: Store, rank: int, rank_count: int, silence_s: float = 30.0) -> None:
        self._store, self._rank, self._rank_count = store, rank, rank_count
        self._silence_s = silence_s
        self._heard: dict[int, tuple[int, float]] = {}
        self._beats = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.arrive(-1)
        self._thread = threading.Thread(target=self._beat, name="roll", daemon=True)
        self._thread.start()

    def arrive(self, place: int) -> None:
        """Write down where this rank is."""
        with self._lock:
            self._store.set(f"place/{self._rank}", str(place))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Turn a collective that failed inside into `RankLost`."""
        try:
            yield
        except RuntimeError as error:
            if not collective(error):
                raise
            raise self.missing() from error

    def check(self) -> None:
        """Raise `RankLost` for ranks that have not beaten for `silence_s`, of calls in between."""
        lost = self.silent()
        if lost is not None:
            raise lost

    def silent(self) -> RankLost | None:
        """The ranks that `check` would name."""
        now = time.monotonic()
        try:
            beats = self._beats_of_all()
        except RuntimeError:
            return RankLost([0], STORE_GONE)
        for rank, count in beats.items():
            if rank not in self._heard or self._heard[rank][0] != count:
                self._heard[rank] = count, now
        others = {rank: heard_s for rank, (_, heard_s) in self._heard.items() if rank != self._rank}
        silent = [rank for rank, heard_s in others.items() if now - heard_s > self._silence_s]
        return RankLost(silent, SILENT) if silent else None

    def dead(self) -> RankLost | None:
        """The ranks that do not beat now, whatever else is wrong. Takes some beats."""
        lost = self.missing(collective_failed=False)
        return lost if lost.silent else None

    @contextmanager
    def naming_the_host(self) -> Iterator[None]:
        """Turn a store that is gone into `RankLost`: its host is rank 0, or the agent that started it."""
        try:
            yield
        except RuntimeError as error:
            raise RankLost([0], STORE_GONE) from error

    def close(self) -> None:
        """Stop beating."""
        self._stop.set()
        self._thread.join(2 * BEAT_S)

    def missing(self, *, collective_failed: bool = True) -> RankLost:
        """Who is, of ranks whose collective has failed. Takes some beats."""
        try:
            if collective_failed:
                with self._lock:
                    self._store.set(f"failed/{self._rank}", "1")
            before = self._signs()
            time.sleep(BEAT_S * PATIENCE_BEATS)
            lost = RankLost(*lost_ranks(before, self._signs()))
            if lost.silent:  # or on a machine that is busy
                time.sleep(BEAT_S * PATIENCE_BEATS)
                lost = RankLost(*lost_ranks(before, self._signs()))
            return lost
        except RuntimeError:
            return RankLost([0], STORE_GONE)

    def _beats_of_all(self) -> dict[int, int]:
        keys = [f"beats/{rank}" for rank in range(self._rank_count)]
        with self._lock:
            if self._store.check(keys):
                return dict(enumerate(map(int, self._store.multi_get(keys))))
        return {rank: sign.beats for rank, sign in self._signs().items()}

    def _signs(self) -> dict[int, Sign]:
        def read(name: str, rank: int) -> int:
            key = f"{name}/{rank}"
            with self._lock:
                return int(self._store.get(key)) if self._store.check([key]) else -1

        return {
            rank: Sign(read("place", rank), read("beats", rank), read("failed", rank) == 1)
            for rank in range(self._rank_count)
        }

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the store went with its host: those that read will say so
            while not self._stop.wait(BEAT_S):
                self._beats += 1
                with self._lock:
                    self._store.set(f"beats/{self._rank}", str(self._beats))


def collective(error: Exception) -> bool:
    """Whether it is what gloo and NCCL raise; an error of our own is no collective's."""
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error))
