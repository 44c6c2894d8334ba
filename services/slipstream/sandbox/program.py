"""What is run, what bounds it, and how it ended: plain values, passed between the event loop and the places."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Outcome(enum.Enum):
    """How a program ended; the names are those of the contract."""

    EXITED = "exited"
    SIGNALED = "signaled"
    WALL_LIMIT = "wall_limit"
    CPU_LIMIT = "cpu_limit"
    MEMORY_LIMIT = "memory_limit"
    PROCESS_LIMIT = "process_limit"
    OUTPUT_LIMIT = "output_limit"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    NOT_STARTED = "not_started"


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    wall_s: float
    cpu_s: float
    memory_bytes: int
    process_count: int
    output_bytes: int
    tmp_bytes: int


@dataclass(frozen=True)
class Program:
    """One program to run."""

    argv: Sequence[str]
    limits: Limits
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Path below /files -> content."""


@dataclass(frozen=True)
class Ended:
    """The end of a program."""

    outcome: Outcome
    exit_code: int = 0
    signal: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    max_memory_bytes: int = 0
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    truncated: bool = False
    message: str = ""


class KillSwitch:
    """Ends a program from any thread. The first reason stays."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.reason: Outcome | None = None
        self._closed = False

    def pull(self, reason: Outcome) -> None:
        if self.reason is None and not self._closed:
            self.reason = reason
            os.eventfd_write(self.descriptor, 1)

    def close(self) -> None:
        """By its owner, on the thread that pulls."""
        self._closed = True
        os.close(self.descriptor)


class Output(Protocol):
    """Output on its way from a place to a reader. Never blocks the writer: the program's output limit bounds it."""

    def write(self, stream: str, data: bytes) -> None:
        """Take bytes of "stdout" or "stderr"."""
        ...

    def flush(self) -> None:
        """Tell the reader that there is something."""
        ...
