"""Whether what a teacher says is a judgement at all: weights that hold NaN load like others, and answer NaN."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.common.config import ConfigError
from slipstream.models.teachers import Bounds
from slipstream.teacher.asked import Asked, Score

TRIAL_TOKENS = 8
TRIAL_TIMEOUT_S = 300.0
"""Of the first pass, which may compile."""


def known(logps: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which of them are log-probabilities that somebody can learn from."""
    return np.isfinite(logps) & (logps <= 0)


async def check_teacher(score: Score, bounds: Bounds, model: Path) -> None:
    """Have it judge tokens from all over the vocabulary. Raises `ConfigError` where it cannot say of each."""
    count = min(TRIAL_TOKENS, bounds.max_context_tokens)
    token_ids = np.linspace(0, bounds.vocab_size - 1, count).astype(np.int32)
    async with asyncio.timeout(TRIAL_TIMEOUT_S):
        [logps] = await score([Asked(token_ids, np.arange(1, count), 1.0)])
    if not known(logps).all():
        wrong = logps[~known(logps)]
        raise ConfigError(
            f"teacher_model: of {len(wrong)} of {len(logps)} tokens {model} gives no log-probability but "
            f"{float(wrong[0])}: its weights are damaged, or of another architecture"
        )
