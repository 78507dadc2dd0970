"""Sets of times, against sets of whole numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from ezpz_llm.explain.events import bridge, intersect, subtract, total, union, within

ANY = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda one: (one[0], one[0] + one[1])),
               max_size=12)


def points(intervals):
    return {point for start, end in intervals for point in range(start, end)}


def is_a_set(intervals):
    return all(start < end for start, end in intervals) and all(
        before[1] <= after[0] for before, after in pairwise(intervals))


@given(ANY, ANY)
def test_arithmetic_is_that_of_sets(one, other):
    a, b = union(one), union(other)
    assert points(a) == points(one)
    for found, expected in ((a, points(one)), (intersect(a, b), points(a) & points(b)),
                            (subtract(a, b), points(a) - points(b))):
        assert is_a_set(found)
        assert points(found) == expected
        assert total(found) == len(expected)


@given(ANY, st.integers(0, 50), st.integers(0, 20))
def test_within_is_the_intersection_with_one(one, start, length):
    assert within(union(one), start, start + length) == intersect(union(one), union([(start, start + length)]))


@pytest.mark.parametrize(("apart", "expected"), [([], [(0, 5), (9, 12)]), ([2], [(0, 2), (3, 5), (9, 12)]),
                                                 ([2.5], [(0, 2), (3, 5), (9, 12)]), ([4], [(0, 5), (9, 12)])])
def test_short_gaps_are_closed_unless_something_happened_there(apart, expected):
    assert bridge([(0, 2), (3, 5), (9, 12)], 2, apart) == expected
