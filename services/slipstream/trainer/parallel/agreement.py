"""What the ranks of a context group must know alike of a micro-batch, before they compute it together.

Each fetched the routes of its own slice from their holders, and any of them may have found a holder gone. A sequence
that one of them lacks is lost for all: its place stays, so that slices stay where their rows are, and holds padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.engine.routes import runs
from slipstream.trainer.parallel.slices import input_ranges
from slipstream.trainer.parallel.world import World
from slipstream.trainer.sequence import Lost, TrainSequence

_NEVER = np.iinfo(np.int64).max


def agree(batch: Sequence[TrainSequence | Lost], world: World) -> list[TrainSequence | Lost]:
    """The micro-batch as the whole group has it; alone, without what is lost.

    `routes` of a sequence then tell of all its rows which are known; those of other ranks' slices hold no experts.
    """
    if world.context_group is None or not batch:
        return [sequence for sequence in batch if isinstance(sequence, TrainSequence)]
    counts = [sequence.input_count for sequence in batch]
    own = input_ranges(counts, world.layout.context, world.context_rank)
    said = [_said(sequence, ranges) for sequence, ranges in zip(batch, own, strict=True)]
    heard = world.largest_of_context(torch.from_numpy(np.concatenate(said))).numpy()
    ends = np.cumsum([len(each) for each in said])
    return [_heard(sequence, each) for sequence, each in zip(batch, np.split(heard, ends[:-1]), strict=True)]


def _said(sequence: TrainSequence | Lost, ranges: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Whether it is lost, where it was computed again (the earliest counts), which of this rank's rows are known."""
    known_N = np.zeros(sequence.input_count, np.int64)
    if isinstance(sequence, Lost):
        return np.concatenate([[1, -_NEVER], known_N])
    for first, last in ranges:
        known_N[first:last] = sequence.known_N[first:last]
    again = sequence.routes.recomputed_from
    return np.concatenate([[0, -_NEVER if again is None else -again], known_N])


def _heard(sequence: TrainSequence | Lost, heard: NDArray[np.int64]) -> TrainSequence | Lost:
    if heard[0] or isinstance(sequence, Lost):
        return Lost(sequence.input_count)
    routes = sequence.routes
    again = None if heard[1] == -_NEVER else int(-heard[1])
    return replace(sequence, routes=replace(routes, unknown_ranges=runs(heard[2:] == 0), recomputed_from=again))
