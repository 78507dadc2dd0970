"""Interval arithmetic, against sets of integers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from ezpz_llm.verify.explain.events import close_gaps, intersect, subtract, total, union, within

ANY = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1])),
               max_size=12)


def points(intervals):
    return {point for start, end in intervals for point in range(start, end)}


def is_a_set(intervals):
    return all(start < end for start, end in intervals) and all(
        before[1] <= after[0] for before, after in pairwise(intervals))


@given(ANY, ANY)
def test_arithmetic_matches_that_of_sets(first, second):
    a, b = union(first), union(second)
    assert points(a) == points(first)
    for result, expected in ((a, points(first)), (intersect(a, b), points(a) & points(b)),
                             (subtract(a, b), points(a) - points(b))):
        assert is_a_set(result)
        assert points(result) == expected
        assert total(result) == len(expected)


@given(ANY, st.integers(0, 50), st.integers(0, 20))
def test_within_is_the_intersection_with_an_interval(intervals, start, length):
    expected = intersect(union(intervals), union([(start, start + length)]))
    assert within(union(intervals), start, start + length) == expected


@pytest.mark.parametrize(("apart", "expected"), [([], [(0, 5), (9, 12)]), ([2], [(0, 2), (3, 5), (9, 12)]),
                                                 ([2.5], [(0, 2), (3, 5), (9, 12)]), ([4], [(0, 5), (9, 12)])])
def test_short_gaps_are_closed_unless_they_contain_a_given_time(apart, expected):
    assert close_gaps([(0, 2), (3, 5), (9, 12)], 2, apart) == expected
