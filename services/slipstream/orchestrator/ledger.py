"""What came from outside, by name: what is open, and the newest that has ended; pages, labels, repeated requests."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from slipstream.api.rollout.v1 import rollout_pb2
from slipstream.common.errors import RequestIdReused

PAGE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Asked:
    """By which request something was made: whoever repeats that hears of the same. Kept in the journal."""

    request_id: str = ""
    digest: bytes = b""
    """Of its body, but for how long it waits."""

    def as_record(self) -> dict[str, str]:
        """Fields of a record."""
        return {"request_id": self.request_id, "digest": self.digest.hex()}

    @classmethod
    def of_record(cls, record: Mapping[str, str]) -> Asked:
        """What a record says. Raises `ValueError` and `KeyError`."""
        return cls(record["request_id"], bytes.fromhex(record["digest"]))


def asked_by(request: rollout_pb2.OpenSessionRequest | rollout_pb2.CreateRolloutRequest) -> Asked:
    """What is kept of a request."""
    body = deepcopy(request)
    if isinstance(body, rollout_pb2.OpenSessionRequest):
        body.wait_ms = 0
    digest = hashlib.blake2b(body.SerializeToString(deterministic=True), digest_size=16).digest()
    return Asked(request.request_id, digest)


def labelled(entry: Entry, labels: Mapping[str, str]) -> bool:
    """Whether it has all of these labels."""
    return all(entry.labels.get(key) == value for key, value in labels.items())


class Entry(Protocol):
    """One of them."""

    @property
    def name(self) -> str: ...
    @property
    def number(self) -> int:
        """Counts them in the order in which they came."""
        ...

    @property
    def asked(self) -> Asked: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def size_bytes(self) -> int:
        """As it is told; of one that has ended always the same."""
        ...


EntryT = TypeVar("EntryT", bound=Entry)


class Ledger(Generic[EntryT]):
    """Keeps them. Of those that have ended the oldest are forgotten, beyond a number and a size."""

    def __init__(self, kept_ended: int, kept_bytes: int | None = None) -> None:
        """`kept_bytes`: of ended ones; the newest is kept whatever its size. None: no such bound."""
        self._kept_ended = kept_ended
        self._kept_bytes = kept_bytes
        self._entries: OrderedDict[str, EntryT] = OrderedDict()
        self._by_request: dict[str, EntryT] = {}
        self._ended: deque[EntryT] = deque()
        self._ended_bytes = 0
        self.last_number = 0

    @property
    def open_count(self) -> int:
        """Those that have not ended."""
        return len(self._entries) - len(self._ended)

    def enter(self, entry: EntryT) -> None:
        """Know one that is new, or of an earlier process; those come in the order of their numbers."""
        self._entries[entry.name] = entry
        self.last_number = max(self.last_number, entry.number)
        if entry.asked.request_id:
            self._by_request[entry.asked.request_id] = entry

    def ended(self, entry: EntryT) -> list[EntryT]:
        """One changes no more. Returns those that are forgotten."""
        self._ended.append(entry)
        self._ended_bytes += entry.size_bytes
        forgotten: list[EntryT] = []
        while len(self._ended) > self._kept_ended or self._too_large:
            oldest = self._ended.popleft()
            self._ended_bytes -= oldest.size_bytes
            del self._entries[oldest.name]
            if self._by_request.get(oldest.asked.request_id) is oldest:
                del self._by_request[oldest.asked.request_id]
            forgotten.append(oldest)
        return forgotten

    @property
    def _too_large(self) -> bool:
        return self._kept_bytes is not None and self._ended_bytes > self._kept_bytes and len(self._ended) > 1

    def get(self, name: str) -> EntryT | None:
        """One by its name."""
        return self._entries.get(name)

    def asked(self, asked: Asked) -> EntryT | None:
        """What this request made already. Raises `RequestIdReused` where it had another body."""
        entry = self._by_request.get(asked.request_id)
        if entry is not None and entry.asked.digest != asked.digest:
            raise RequestIdReused("this request_id came with another body before", request_id=asked.request_id)
        return entry

    def page(self, after_number: int, size: int, labels: Mapping[str, str]) -> tuple[list[EntryT], bool]:
        """Those that came after `after_number` and have these labels, oldest first, and whether there are more.

        At most `size` of them, and no more than fit into a message, but at least one.
        """
        page: list[EntryT] = []
        size_bytes = 0
        for entry in self.with_labels(labels):
            if entry.number <= after_number:
                continue
            size_bytes += entry.size_bytes
            if page and (len(page) == size or size_bytes > PAGE_BYTES):
                return page, True
            page.append(entry)
        return page, False

    def with_labels(self, labels: Mapping[str, str]) -> Iterable[EntryT]:
        """Those that have all of these labels."""
        return (each for each in self if labelled(each, labels))

    def __iter__(self) -> Iterator[EntryT]:
        return iter(self._entries.values())
