"""Sequences into micro-batches under a token budget, the same number of them for every rank. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], max_tokens: int, rank_count: int = 1) -> list[list[list[int]]]:
    """Indexes into `lengths`, as `[rank][micro_batch][sequence]`.

    * Every sequence is in exactly one micro-batch; the tokens of a micro-batch do not exceed `max_tokens`, except
      that a longer sequence has one of its own.
    * All ranks get the same number of micro-batches, the last ones possibly empty: unequal counts would hang
      collectives.
    * Sequences of similar length go together, as attention pads a micro-batch to its longest, and within the number
      of micro-batches needed their sizes are evened out.
    * Depends on nothing but its arguments.
    """
    if max_tokens < 1 or rank_count < 1:
        raise ValueError("max_tokens and rank_count must be at least 1")
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    # Cutting at the budget leaves a small rest at the end; the same number of cuts at the mean has none.
    batches = _cut(longest_first, lengths, max_tokens)
    if batches:
        # As many as ranks can share, where there are sequences for them: else some would idle through empty ones.
        count = min(-(-len(batches) // rank_count) * rank_count, len(lengths))
        even = max(-(-sum(lengths) // count), lengths[longest_first[0]])
        for target in range(even, max_tokens, max(1, even // 200)):
            candidate = _cut(longest_first, lengths, target)
            if len(candidate) <= count:
                batches = candidate
                break
    return _deal(batches, lengths, rank_count)


def _cut(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut a sorted list of sequences wherever the next one would exceed the budget."""
    batches: list[list[int]] = []
    room = 0
    for index in order:
        if not batches or lengths[index] > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(index)
        room -= lengths[index]
    return batches


def _deal(batches: list[list[int]], lengths: Sequence[int], rank_count: int) -> list[list[list[int]]]:
    """Give each rank the same number of micro-batches and nearly the same number of tokens (largest first)."""
    count = -(-len(batches) // rank_count)
    ranks: list[list[list[int]]] = [[] for _ in range(rank_count)]
    tokens = [0] * rank_count
    sizes = [sum(lengths[index] for index in batch) for batch in batches]
    for position in sorted(range(len(batches)), key=lambda position: (-sizes[position], position)):
        rank = min((r for r in range(rank_count) if len(ranks[r]) < count), key=lambda r: (tokens[r], r))
        ranks[rank].append(batches[position])
        tokens[rank] += sizes[position]
    for rank in ranks:
        rank.extend([] for _ in range(count - len(rank)))
    return ranks
