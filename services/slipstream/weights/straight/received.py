"""A version that an engine has read by itself and found whole. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slipstream.weights.manifest import Manifest


@dataclass(frozen=True)
class Received:
    """Weights where the engine applies them from, every slice's sum compared."""

    manifest: Manifest
    handle: Any
    """The engine's own."""
    release: Callable[[], None]
    """Nobody will apply it any more; may be called twice. What is in use stays."""
    transfer_s: float = 0.0
    check_s: float = 0.0
