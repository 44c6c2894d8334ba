"""Memory of other processes, by processes that live and end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from slipstream.weights.straight import mappings
from slipstream.weights.straight.mappings import Mappings

DEADLINE_S = 30.0


class Card:
    """Counts what is mapped."""

    def __init__(self) -> None:
        self.mapped: dict[int, bytes] = {}
        self.made = 0
        self.mappings = Mappings(self.map, self.unmap)

    def map(self, handle: bytes) -> int:
        self.made += 1
        self.mapped[self.made] = handle
        return self.made

    def unmap(self, address: int) -> None:
        del self.mapped[address]

    def look(self, pid: int, handle: bytes) -> int:
        with self.mappings.address(pid, handle) as address:
            return address


@contextmanager
def owner() -> Generator[subprocess.Popen[bytes], None, None]:
    """A process that lives until it is ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(DEADLINE_S)


def test_an_allocation_is_mapped_once_and_unmapped_in_the_end():
    card = Card()
    assert [card.look(os.getpid(), handle) for handle in (b"a", b"b", b"a")] == [1, 2, 1]
    card.mappings.close()
    assert card.mapped == {}


def test_what_an_ended_process_had_is_unmapped_without_another_call():
    card = Card()
    card.look(os.getpid(), b"own")
    with owner() as other:
        card.look(other.pid, b"other")
        end(other)
    deadline_s = time.monotonic() + DEADLINE_S
    while b"other" in card.mapped.values() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert list(card.mapped.values()) == [b"own"]
    card.mappings.close()


def test_nothing_is_unmapped_while_it_is_read():
    card = Card()
    closing = threading.Thread(target=card.mappings.close)
    with owner() as other, card.mappings.address(other.pid, b"other") as address:
        end(other)
        closing.start()
        closing.join(2 * mappings.LOOK_S)
        assert address in card.mapped
    closing.join(DEADLINE_S)
    assert card.mapped == {}


def test_no_more_is_mapped_than_allowed_the_oldest_goes():
    card = Card()
    for number in range(mappings.MAX_OPEN + 3):
        card.look(os.getpid(), str(number).encode())
    assert list(card.mapped.values()) == [str(number).encode() for number in range(3, mappings.MAX_OPEN + 3)]
    card.mappings.close()
