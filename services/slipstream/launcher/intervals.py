"""Busy intervals `(start_s, end_s)`: union, intersection, clipping. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval], gap_s: float = 0.0) -> list[Interval]:
    """Disjoint ascending intervals that cover the same time; gaps up to `gap_s` are closed."""
    merged: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if merged and start_s <= merged[-1][1] + gap_s:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        elif end_s > start_s:
            merged.append((start_s, end_s))
    return merged


def intersection(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """Time in both; each side as `union` returns it."""
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start_s = max(left[i][0], right[j][0])
        end_s = min(left[i][1], right[j][1])
        if start_s < end_s:
            common.append((start_s, end_s))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def total_s(intervals: Iterable[Interval]) -> float:
    return sum(end_s - start_s for start_s, end_s in intervals)


def clip(intervals: Iterable[Interval], start_s: float, end_s: float) -> list[Interval]:
    return [(max(a, start_s), min(b, end_s)) for a, b in intervals if a < end_s and b > start_s]
