"""Work on a card that neither waits for the steps queued there nor has them wait."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


class Aside:
    """A stream of its own, where the device is a card; elsewhere nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def entered(self) -> Generator[None, None, None]:
        """The calling thread's work goes to that stream. Nothing that others queued is waited for."""
        if self._device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            yield

    def finish(self) -> None:
        """Return once what was queued there is done."""
        if self._stream is not None:
            self._stream.synchronize()
