"""A process group of two for each reader: the trainer sends, the engine receives. NCCL between cards, Gloo elsewhere.

| thread | does | waits for | ended by |
|---|---|---|---|
| one a reader, at the trainer | meets it, then sends what it borrows | its next loan | silence, an error, `close` |

A link on which anything failed is given up by both ends: the reader comes again under another name.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from slipstream.api.broadcast.v1 import broadcast_pb2
from slipstream.common.config import ENVIRONMENT
from slipstream.common.errors import DeadlineExceeded, Overloaded, Unreachable, Unsupported
from slipstream.weights.straight.aside import Aside
from slipstream.weights.straight.links import Run
from slipstream.weights.straight.memory import DeviceMemory, Memory

log = structlog.get_logger()

PIECE_BYTES = {"nccl": 1 << 28, "gloo": 1 << 24}
POLL_S = 0.0002
MEET_POLL_S = 0.005
MAX_READERS = 64
IDLE_S = 3600.0
"""A reader that has borrowed nothing for so long is forgotten."""
CLOSE_S = 5.0
_SENDER, _READER = 0, 1
_OWN_ENDINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""A group that fails must not end the process: that is what the deadlines here are for."""


class CollectiveLender:
    """Sends to each reader on a thread of its own."""

    def __init__(self, device: torch.device, host: str, backend: str, timeout_s: float) -> None:
        self._device = device
        self._backend = backend if backend != "auto" else ("nccl" if device.type == "cuda" else "gloo")
        self._timeout_s = timeout_s
        timeout = timedelta(seconds=timeout_s)
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self._address = f"{host}:{self._store.port}"
        self._senders: dict[str, _Sender] = {}
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def allocate(self, size_bytes: int) -> Memory:
        return DeviceMemory(size_bytes, self._device)

    def offer(self, memory: Memory, size_bytes: int, reader: str) -> broadcast_pb2.BorrowShardResponse:
        piece_bytes = PIECE_BYTES[self._backend]
        with self._lock:
            self._senders = {name: sender for name, sender in self._senders.items() if sender.thread.is_alive()}
            sender = self._senders.get(reader)
            if sender is None:
                if len(self._senders) >= MAX_READERS:
                    raise Overloaded(f"{MAX_READERS} readers are served", limit=MAX_READERS)
                sender = self._senders[reader] = _Sender(self._meet(reader), self._device, self._timeout_s)
        sender.jobs.put(memory.data[:size_bytes].split(piece_bytes))
        link = broadcast_pb2.CollectiveLink(
            store=self._address, name=reader, piece_bytes=piece_bytes, backend=self._backend
        )
        return broadcast_pb2.BorrowShardResponse(size_bytes=size_bytes, link=link)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            senders, self._senders = list(self._senders.values()), {}
        for sender in senders:
            sender.jobs.put(None)
        for sender in senders:
            sender.thread.join(CLOSE_S)

    def _meet(self, reader: str) -> Callable[[], Any]:
        host, _, _ = self._address.rpartition(":")
        ended = self._closed.is_set
        card = _card(self._device)
        return lambda: _group(self._backend, self._store, reader, _SENDER, host, self._timeout_s, card, ended)


class _Sender:
    """One reader's link."""

    def __init__(self, meet: Callable[[], Any], device: torch.device, timeout_s: float) -> None:
        self.jobs: queue.SimpleQueue[tuple[Tensor, ...] | None] = queue.SimpleQueue()
        """Bounded by the loans that one reader has."""
        self._meet = meet
        self._device = device
        self._timeout_s = timeout_s
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        group: Any = None
        aside = Aside(self._device)
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while (pieces := self._next()) is not None:
                if group is None:
                    group = self._meet()
                send = partial(group.send, dstRank=_READER, tag=0)
                starts = (partial(send, [piece]) for piece in pieces)
                with aside.entered():
                    _finish(starts, time.monotonic() + self._timeout_s, self._device)
        except (RuntimeError, DeadlineExceeded, Unsupported) as error:  # the reader is gone, or late: it comes again
            log.info("weights_link_ended", detail=str(error).partition("\n")[0])
        finally:
            _abort(group)

    def _next(self) -> tuple[Tensor, ...] | None:
        try:
            return self.jobs.get(timeout=IDLE_S)
        except queue.Empty:
            return None


class CollectiveReader:
    """Receives straight into the target where a message is one stretch of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._aside = Aside(device)
        self._groups: dict[tuple[str, str], Any] = {}

    def read(
        self,
        loan: broadcast_pb2.BorrowShardResponse,
        runs: Sequence[Run],
        target: Tensor,
        reader: str,
        deadline_s: float,
    ) -> None:
        link, left_s = loan.link, max(deadline_s - time.monotonic(), 0.001)
        key = (link.store, link.name)
        if (link.backend == "nccl") != (target.device.type == "cuda"):
            raise Unsupported(f"{link.backend} sends, and {target.device.type!r} is to receive", backend=link.backend)
        try:
            if key not in self._groups:
                self._forget(lambda each: each[0] == link.store)
                host, _, port = link.store.rpartition(":")
                timeout = timedelta(seconds=left_s)
                store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
                card = _card(self._device)
                self._groups[key] = _group(link.backend, store, link.name, _READER, host, left_s, card)
            group = self._groups[key]
            landings = list(_landings(runs, link.piece_bytes, target))
            receive = partial(group.recv, srcRank=_SENDER, tag=0)
            with self._aside.entered():
                _finish((partial(receive, [piece]) for piece, _ in landings), deadline_s, self._device)
                for piece, places in landings:
                    at = 0
                    for offset, size in places:
                        target[offset : offset + size].copy_(piece[at : at + size])
                        at += size
                self._aside.finish()  # whoever looks at it next does so on another stream
        except (RuntimeError, DeadlineExceeded) as error:
            self._forget(lambda each: each == key)
            if time.monotonic() >= deadline_s or isinstance(error, DeadlineExceeded):
                raise DeadlineExceeded("the weights were not received in time") from error
            raise Unreachable(f"the trainer's link broke: {str(error).partition(chr(10))[0]}") from error

    def close(self) -> None:
        self._forget(lambda each: True)

    def _forget(self, which: Callable[[tuple[str, str]], bool]) -> None:
        for key in [each for each in self._groups if which(each)]:
            _abort(self._groups.pop(key))


def _landings(runs: Sequence[Run], piece_bytes: int, target: Tensor) -> Iterator[tuple[Tensor, list[tuple[int, int]]]]:
    """For each message the memory that it is received into, and where its parts then go, if they do not lie there."""
    total = sum(run.size_bytes for run in runs)
    rest = list(reversed(runs))
    for begin in range(0, total, piece_bytes):
        left = min(piece_bytes, total - begin)
        places: list[tuple[int, int]] = []
        while left:
            run = rest.pop()
            size = min(run.size_bytes, left)
            places.append((run.target, size))
            if size < run.size_bytes:
                rest.append(Run(run.source + size, run.target + size, run.size_bytes - size))
            left -= size
        if len(places) == 1:
            offset, size = places[0]
            yield target[offset : offset + size], []
        else:
            yield torch.empty(sum(size for _, size in places), dtype=torch.uint8, device=target.device), places


def _group(
    backend: str,
    store: Any,
    name: str,
    rank: int,
    host: str,
    timeout_s: float,
    card: str,
    ended: Callable[[], bool] = lambda: False,
) -> Any:
    """Returns once both are there. Raises as `meet` does."""
    timeout = timedelta(seconds=timeout_s)
    prefixed = PrefixStore(name, store)
    meet(prefixed, rank, card, time.monotonic() + timeout_s, ended)
    if backend == "gloo":
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timeout
        return gloo(prefixed, rank, 2, options)
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    with _environment(_OWN_ENDINGS):
        return nccl(prefixed, rank, 2, options)


def meet(store: Any, rank: int, card: str, deadline_s: float, ended: Callable[[], bool] = lambda: False) -> None:
    """By looking: a wait in a store keeps its other users out, and NCCL waits for ever for who is not there.

    Raises `DeadlineExceeded` if the other end does not come, `Unsupported` if it is on the same card.
    """
    store.set(f"here/{rank}", card)
    while not store.check([f"here/{1 - rank}"]):
        if ended() or time.monotonic() > deadline_s:
            raise DeadlineExceeded("the other end did not come")
        time.sleep(MEET_POLL_S)
    if card and store.get(f"here/{1 - rank}").decode() == card:
        raise Unsupported("nccl connects no card with itself: for a trainer and an engine on one card take cuda_ipc")


def _card(device: torch.device) -> str:
    """The same in all processes that see it; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _finish(starts: Iterator[Callable[[], Any]], deadline_s: float, device: torch.device) -> None:
    """Do them in order. Raises `DeadlineExceeded`, or torch's `RuntimeError`."""
    if device.type == "cpu":
        for start in starts:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded("no time is left")
            start().wait(timedelta(seconds=left_s))
        return
    works = [start() for start in starts]
    for work in works:
        while not work.is_completed():
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded("no time is left")
            time.sleep(POLL_S)
    for work in works:
        work.wait()  # raises what went wrong


def _abort(group: Any) -> None:
    if group is not None and hasattr(group, "abort"):
        group.abort()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: ENVIRONMENT.get(name) for name in values}
    ENVIRONMENT.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                ENVIRONMENT.pop(name, None)
            else:
                ENVIRONMENT[name] = value
