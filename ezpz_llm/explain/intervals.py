"""Arithmetic on sets of times: sorted lists of disjoint half-open intervals (start, end)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Any intervals, overlapping and in any order, as a set. Empty ones are dropped."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def within(intervals: Sequence[Interval], start: float, end: float) -> list[Interval]:
    """The part of a set that lies between two times."""
    if end <= start:
        return []
    first = bisect_right(intervals, start, key=lambda one: one[1])
    last = bisect_left(intervals, end, key=lambda one: one[0])
    return [(max(a, start), min(b, end)) for a, b in intervals[first:last]]


def subtract(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Difference of two sets."""
    found, j = [], 0
    for start, end in one:
        while j < len(other) and other[j][1] <= start:
            j += 1
        k = j
        while k < len(other) and other[k][0] < end:
            if start < other[k][0]:
                found.append((start, other[k][0]))
            start = max(start, other[k][1])
            k += 1
        if start < end:
            found.append((start, end))
    return found


def intersect(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Intersection of two sets."""
    return subtract(one, subtract(one, other))


def bridge(intervals: Sequence[Interval], gap: float, apart: Sequence[float] = ()) -> list[Interval]:
    """A set without its gaps shorter than `gap`, but for those in which one of the times `apart` (sorted) lies."""
    found: list[Interval] = []
    for start, end in intervals:
        if found and start - found[-1][1] < gap:
            before = found[-1][1]
            if bisect_left(apart, before) == bisect_right(apart, start):
                found[-1] = (found[-1][0], end)
                continue
        found.append((start, end))
    return found


def total(intervals: Iterable[Interval]) -> float:
    """The length of a set."""
    return sum(end - start for start, end in intervals)
