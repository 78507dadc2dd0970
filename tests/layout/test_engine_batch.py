"""Tests of batch sizes."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.layout.batch import Batch, solve_batch

SMALL = st.integers(1, 64)


@given(SMALL, SMALL, SMALL)
def test_two_sizes_determine_the_third(micro: int, accumulation: int, dp_size: int) -> None:
    total = micro * accumulation * dp_size
    expected = Batch(total, micro, accumulation, dp_size)
    assert solve_batch(total, micro, None, dp_size) == expected
    assert solve_batch(total, None, accumulation, dp_size) == expected
    assert solve_batch(None, micro, accumulation, dp_size) == expected
    assert solve_batch(total, micro, accumulation, dp_size) == expected


@given(st.none() | st.integers(1, 4096), st.none() | SMALL, st.none() | SMALL, SMALL, SMALL)
def test_the_product_is_right_and_given_sizes_are_kept(
        total: int | None, micro: int | None, accumulation: int | None, dp_size: int, default: int) -> None:
    try:
        batch = solve_batch(total, micro, accumulation, dp_size, default_micro_batch=default)
    except UserError:
        assert total is not None  # only a total can be contradicted
        return
    assert batch.micro_batch * batch.accumulation * batch.dp_size == batch.global_batch
    for size, solved in ((total, batch.global_batch), (micro, batch.micro_batch),
                         (accumulation, batch.accumulation)):
        assert size is None or size == solved


@given(st.integers(1, 2048), SMALL, SMALL)
def test_suggested_totals_are_valid(total: int, micro: int, dp_size: int) -> None:
    try:
        solve_batch(total, micro, None, dp_size)
    except UserError as error:
        if "cannot feed" in error.found:
            assert total < dp_size
            return
        suggested = error.instead.removeprefix("a global batch of ").split(",")[0].split(" or ")
        for value in map(int, suggested):
            solve_batch(value, micro, None, dp_size)


def test_a_global_batch_alone_uses_the_largest_micro_batch_that_divides_it() -> None:
    assert solve_batch(12, None, None, 2, default_micro_batch=4) == Batch(12, 3, 2, 2)
    assert solve_batch(12, None, None, 1, default_micro_batch=4) == Batch(12, 4, 3, 1)
    assert solve_batch(None, None, None, 3, default_micro_batch=4) == Batch(12, 4, 1, 3)


@pytest.mark.parametrize(("numbers", "dp_size", "parts"), [
    ((512, 8, None), 7, ("512", "504", "560")),  # never rounded to 10 micro-steps
    ((24, 8, None), 2, ("16 or 32", "micro-batch 6 or 12")),
    ((24, None, 5), 2, ("20 or 30", "accumulation 4 or 6")),
    ((7, None, None), 2, ("6 or 8",)),
    ((4, None, None), 8, ("cannot feed 8", "at least 8", "at most 4")),
    ((64, 4, 2), 2, ("64", "16", "only two")),
    ((64, 4, 2), 1, ("launch -n 8",)),  # the world size of a program started without its launcher
    ((0, None, None), 1, ("0", "1 or more")),
    ((8, None, -1), 1, ("-1", "1 or more")),
])
def test_contradicting_sizes_are_rejected_with_suggestions(
        numbers: tuple[int | None, ...], dp_size: int, parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        solve_batch(*numbers, dp_size, where="--global-batch-size")
    assert all(word in str(caught.value) for word in (*parts, "--global-batch-size"))
