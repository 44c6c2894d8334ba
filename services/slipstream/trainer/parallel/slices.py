"""What one context rank computes of a micro-batch: its tokens, its routes, its targets. numpy only.

The micro-batch is padded to a multiple of twice the number of context ranks, so that every rank holds two pieces of the
same size: one from the front and its mirror image from the back. Causal attention over one long document then costs
all ranks the same. Padding is a document of its own behind the others, which nobody sees, and whose experts are spread
evenly; so is the place of a sequence that was lost. A micro-batch without sequences is padding alone: it goes through
the same collectives and adds nothing to any gradient.

T = tokens of the micro-batch with padding, S = those of one rank, R = targets of the micro-batch, L = MoE layers,
K = experts a token, E = experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.routes import route_dtype
from slipstream.trainer.sequence import Lost, TrainSequence


@dataclass(frozen=True)
class Slice:
    """One rank's part of a micro-batch."""

    lengths: tuple[int, ...]
    """Inputs of each document of the whole micro-batch, padding last; the same on all context ranks."""

    index_S: NDArray[np.int64]
    """Which of the T tokens are here, ascending."""

    tokens_S: NDArray[np.int64]
    positions_S: NDArray[np.int64]
    document_S: NDArray[np.int64]
    real_S: NDArray[np.bool_]
    """False for padding."""

    replay_SLK: NDArray[np.unsignedinteger]
    known_S: NDArray[np.bool_]
    source_R: NDArray[np.int64]
    """Which of the S tokens stands before each target that is computed here."""

    targets_R: NDArray[np.int64]
    target_index_R: NDArray[np.int64]
    """Which of the micro-batch's targets those are."""

    target_count: int
    """Targets of the whole micro-batch."""


def padded_count(token_count: int, context: int) -> int:
    """Tokens with padding; at least one for each half of each rank."""
    unit = 2 * context if context > 1 else 1
    return max(unit, -(-token_count // unit) * unit)


def rank_index(token_count: int, context: int, rank: int) -> NDArray[np.int64]:
    """Of `token_count` padded tokens, those of a context rank, ascending: piece `rank` and its mirror image."""
    if context == 1:
        return np.arange(token_count)
    piece = token_count // (2 * context)
    mirror = 2 * context - 1 - rank
    return np.concatenate(
        [np.arange(rank * piece, (rank + 1) * piece), np.arange(mirror * piece, (mirror + 1) * piece)]
    )


def input_ranges(lengths: Sequence[int], context: int, rank: int) -> list[list[tuple[int, int]]]:
    """Which inputs of each sequence of a micro-batch a context rank holds: the rows of routes that it fetches.

    Half-open, in positions of the sequence, at most two of them. `lengths` counts inputs, without padding.
    """
    total = padded_count(sum(lengths), context)
    piece = total // (2 * context)
    held = [(rank * piece, (rank + 1) * piece), (total - (rank + 1) * piece, total - rank * piece)]
    if context == 1:
        held = [(0, total)]
    ranges, start = [], 0
    for length in lengths:
        cut = [(max(first, start) - start, min(last, start + length) - start) for first, last in held]
        ranges.append([(first, last) for first, last in cut if first < last])
        start += length
    return ranges


def even_routes(count: int, moe_layers: int, top_k: int, expert_count: int) -> NDArray[np.unsignedinteger]:
    """Routes of padding `[count, L, K]`: all experts in turn, none twice in a row."""
    turn_NK = np.arange(count)[:, None] * top_k + np.arange(top_k)[None, :]
    return np.repeat((turn_NK % expert_count)[:, None, :], moe_layers, axis=1).astype(route_dtype(expert_count))


def slice_of(
    batch: Sequence[TrainSequence | Lost],
    *,
    context: int,
    rank: int,
    moe_layers: int,
    top_k: int,
    expert_count: int,
) -> Slice:
    """The part of context rank `rank`. A dense model has no MoE layers, and its routes no rows."""
    real_count = sum(sequence.input_count for sequence in batch)
    total = padded_count(real_count, context)
    documents = [*batch, Lost(total - real_count)] if total > real_count else list(batch)
    lengths = [document.input_count for document in documents]
    index_S = rank_index(total, context, rank)
    starts = np.cumsum([0, *lengths])
    real = [(start, each) for start, each in zip(starts, documents, strict=False) if isinstance(each, TrainSequence)]
    source_all = _joined([start + each.target_positions - 1 for start, each in real])
    here_R = np.isin(source_all, index_S)

    def of_all(values: Callable[[TrainSequence], NDArray[Any]], padding: Callable[[int], NDArray[Any]]) -> Any:
        parts = (values(each) if isinstance(each, TrainSequence) else padding(each.input_count) for each in documents)
        return np.concatenate(list(parts))[index_S]

    if moe_layers:
        even = partial(even_routes, moe_layers=moe_layers, top_k=top_k, expert_count=expert_count)
        replay_SLK = of_all(lambda each: each.routes.rows, even)
        known_S = of_all(lambda each: each.known_N, _true)
    else:
        replay_SLK, known_S = np.zeros((len(index_S), 0, top_k), np.uint8), np.ones(len(index_S), dtype=bool)
    return Slice(
        lengths=tuple(lengths),
        index_S=index_S,
        tokens_S=of_all(lambda each: each.token_ids[:-1].astype(np.int64), _zeros),
        positions_S=np.concatenate([np.arange(length) for length in lengths])[index_S],
        document_S=np.repeat(np.arange(len(lengths)), lengths)[index_S],
        real_S=of_all(lambda each: _true(each.input_count), _false),
        replay_SLK=replay_SLK,
        known_S=known_S,
        source_R=np.searchsorted(index_S, source_all[here_R]),
        targets_R=_joined([each.token_ids[each.target_positions] for _, each in real])[here_R],
        target_index_R=np.flatnonzero(here_R),
        target_count=len(source_all),
    )


def _zeros(count: int) -> NDArray[np.int64]:
    return np.zeros(count, np.int64)


def _true(count: int) -> NDArray[np.bool_]:
    return np.ones(count, dtype=bool)


def _false(count: int) -> NDArray[np.bool_]:
    return np.zeros(count, dtype=bool)


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
