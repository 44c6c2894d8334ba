"""What teacher workers said of a micro-batch, which came with its rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.trainer.sequence import TrainSequence


def teacher_logps(batch: Sequence[TrainSequence]) -> NDArray[np.float32]:
    """Of all targets, in order; NaN where nobody was asked, so that the loss leaves the token out."""
    parts = [
        np.full(len(each.target_positions), np.nan, np.float32)
        if each.teacher_logps is None
        else np.where(each.teacher_logps <= 0, each.teacher_logps, np.nan).astype(np.float32)
        for each in batch
    ]
    return np.concatenate([np.zeros(0, np.float32), *parts])
