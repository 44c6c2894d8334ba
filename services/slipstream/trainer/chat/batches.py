"""Which conversations each step learns from: a pure function of their lengths and the seed. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from slipstream.trainer.chat.config import TrainingConfig


def plan_steps(
    lengths: Sequence[int], config: TrainingConfig, seed: int, *, step: int = 0, taken: int = 0
) -> list[list[int]]:
    """Indexes into `lengths` by step. A step has as many whole conversations as fit, one at least.

    An epoch's order is drawn from the seed and its number; steps go on over the end of an epoch, so that only the last
    one of all is short. `step`, `taken`: so many steps took so many conversations; what comes is of the steps after.
    """
    steps: list[list[int]] = []
    room = 0
    for index in islice(order(len(lengths), config.epochs, seed), taken, None):
        if not steps or lengths[index] > room:
            if config.max_steps is not None and step + len(steps) >= config.max_steps:
                break
            steps.append([])
            room = config.tokens_per_step
        steps[-1].append(index)
        room -= lengths[index]
    return steps


def order(count: int, epochs: int, seed: int) -> Iterator[int]:
    """In which conversations are taken, over all epochs; more epochs go on where fewer end."""
    for epoch in range(epochs):
        yield from np.random.default_rng([seed, epoch]).permutation(count).tolist()
