"""The prompt by which an engine shows, after an update, that it computes what the trainer computes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

SAFE_MARGIN = 1e-4
"""Experts chosen by less than this could be chosen otherwise after rounding, which is no fault of the weights."""

MAX_CANDIDATES = 8


def probe_prompts(vocab_size: int, token_count: int, seed: int) -> list[tuple[int, ...]]:
    """Candidate prompts of random tokens, the same for every version of a run."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(vocab_size) for _ in range(token_count)) for _ in range(MAX_CANDIDATES)]


def choose_probe(
    prompts: Sequence[tuple[int, ...]], probe: Callable[[Sequence[int]], tuple[list[float], float]]
) -> tuple[tuple[int, ...], list[float]]:
    """The first prompt whose experts are chosen by a safe margin, else the one with the widest, and its figures.

    `probe` gives log-probabilities and margin. Nearly always the first prompt serves.
    """
    best: tuple[float, tuple[int, ...], list[float]] | None = None
    for prompt in prompts:
        logps, margin = probe(prompt)
        if best is None or margin > best[0]:
            best = (margin, prompt, logps)
        if margin >= SAFE_MARGIN:
            break
    assert best is not None
    return best[1], best[2]
