"""Memory beside a vLLM model, on its device, into which its own process reads new weights while steps go on.

There is room for two versions: the one in use, to go back to, and the next. The engine's side counts the places
(`Stages`), vLLM's process has the memory (`Stage`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.api.broadcast.v1 import broadcast_pb2
from slipstream.common.config import ConfigError
from slipstream.common.errors import DeadlineExceeded, SlipstreamError, Unreachable, Unsupported, WeightsCorrupt
from slipstream.engine.vllm.arena import TensorMemory
from slipstream.engine.vllm.layout import Layout
from slipstream.weights.manifest import Manifest
from slipstream.weights.straight.receiver import Figures, Receiver

PLACES = 2
"""Each of the size of the weights, made when the first versions come."""
_RAISED: Mapping[str, type[SlipstreamError]] = {
    each.reason: each for each in (WeightsCorrupt, DeadlineExceeded, Unreachable, Unsupported)
}


def free_bytes(device: torch.device) -> int:
    """What can still be allocated on a device, with what torch holds there and does not use."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def check_room(size_bytes: int, free: int, transport: str) -> None:
    """Raise `ConfigError` where the places will not fit: the first versions would find out in the middle of a run."""
    if free < PLACES * size_bytes:
        raise ConfigError(
            f"weights.transport is {transport!r}, which reads new weights into {PLACES} places of {_gb(size_bytes)} "
            f"beside those in use, and {_gb(free)} are free on the engine's device: lower engine.gpu_memory_fraction, "
            "or take weights.transport 'grpc'"
        )


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.3g} GB"


class Stage(TensorMemory):
    """The tensors of one version, filled on a thread of its own."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout, torch.zeros(layout.size_bytes, dtype=torch.uint8, device=device))
        self._zeroed: torch.cuda.Event | None = None
        if device.type == "cuda":  # the zeros are queued behind steps, and what is read comes on another stream
            with torch.cuda.device(device):
                self._zeroed = torch.cuda.Event()
                self._zeroed.record()
        self._thread: threading.Thread | None = None
        self._figures: Figures | None = None
        self._error: tuple[str, str] | None = None

    def fill_from(
        self, receiver: Receiver, manifest: Manifest, loans: list[bytes], reader: str, timeout_s: float
    ) -> bool:
        """Begin to read a version, unless one that was given up is still being written here."""
        if self._thread is not None and self._thread.is_alive():
            return False
        self._figures = self._error = None
        deadline_s = time.monotonic() + timeout_s
        arguments = (receiver, manifest, loans, reader, deadline_s)
        self._thread = threading.Thread(target=self._fill, args=arguments, daemon=True)
        self._thread.start()
        return True

    def outcome(self) -> tuple[str, str, float, float] | None:
        """None while it is read; then the reason and words of an error, empty without one, and seconds."""
        if self._thread is not None and self._thread.is_alive():
            return None
        if self._figures is None:
            reason, message = self._error or ("INTERNAL", "nothing was asked for")
            return reason, message, 0.0, 0.0
        return "", "", self._figures.transfer_s, self._figures.check_s

    def _fill(self, receiver: Receiver, manifest: Manifest, loans: list[bytes], reader: str, deadline_s: float) -> None:
        try:
            if self.memory.device.type == "cuda":
                torch.cuda.set_device(self.memory.device)
            if self._zeroed is not None:
                self._zeroed.synchronize()
            if strange := {part.dtype for part in manifest.slices} - {self.layout.dtype}:
                raise Unsupported(f"{manifest.version} comes in {min(strange)}, and here is {self.layout.dtype}")
            offers = [broadcast_pb2.BorrowShardResponse.FromString(loan) for loan in loans]
            places = {name: place.offset_bytes for name, place in self.layout.places.items()}
            self.tensors()  # of 6,000 tensors that takes a tenth of a second, of a pause otherwise
            self._figures = receiver.receive(manifest, offers, self.memory, places, reader, deadline_s)
        except SlipstreamError as error:
            self._error = error.reason, error.message
        except Exception as error:  # whatever it was, it is told to the engine's side
            self._error = "INTERNAL", f"{type(error).__name__}: {error}"


@dataclass
class Staged:
    """A place, as the engine's side knows it: taken as long as a version is held there or in use."""

    number: int
    layout: Layout
    held: bool = False
    """Its version may still be applied."""
    in_use: bool = False
    """The model's weights are a copy of it."""

    @property
    def path(self) -> str:
        """What vLLM's process knows it by."""
        return f"stage-{self.number}"


class Stages:
    """Which of the places are free."""

    def __init__(self, layout: Layout) -> None:
        self._places = [Staged(number, layout) for number in range(PLACES)]
        self._changed = asyncio.Event()

    async def take(self, deadline_s: float) -> Staged:
        """A free place, as soon as there is one. Raises `DeadlineExceeded`."""
        while True:
            self._changed.clear()
            for place in self._places:
                if not place.held and not place.in_use:
                    place.held = True
                    return place
            try:
                async with asyncio.timeout(max(deadline_s - time.monotonic(), 0)):
                    await self._changed.wait()
            except TimeoutError:
                raise DeadlineExceeded("no memory became free for new weights") from None

    def release(self, place: Staged) -> None:
        """What was read there will not be applied; if it is in use it stays."""
        place.held = False
        self._changed.set()

    def use(self, place: Staged, in_use: bool) -> None:
        place.in_use = in_use
        self._changed.set()


def error_of(reason: str, message: str) -> Exception:
    """What `Stage.outcome` speaks of."""
    return _RAISED[reason](message) if reason in _RAISED else RuntimeError(message)
