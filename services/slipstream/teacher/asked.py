"""What is asked of a teacher, whatever computes it. Imports no torch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Asked:
    """A sequence, and the positions asked about, ascending from 1."""

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    temperature: float


Score = Callable[[Sequence[Asked]], Awaitable[list[NDArray[np.float32]]]]
"""Log-probabilities of the positions of each. Raises for any reason, all together."""
