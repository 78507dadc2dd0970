"""Reductions of bf16 gradients and tensor-parallel sums: exact sums of the ranks' inputs, up to their roundings."""

from __future__ import annotations

from typing import Any

import pytest
from launch_runs import need_mpiexec
from places import HELPERS
from rank_jobs import results_of

RANKS, MICRO_STEPS = 4, 2
ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8}
RUNS = ("ddp:fp32:fp32", "ddp:fp32:bf16", "fsdp2:fp32:fp32", "fsdp2:fp32:bf16", "zero1:fp32:fp32",
        "zero1:fp32:bf16", "zero2:bf16:fp32", "zero2:bf16:bf16", "zero3:fp32:bf16", "zero3:bf16:fp32",
        "pp2:fp32:fp32", "pp2:fp32:bf16")
"""Layout, dtype of gradient accumulation, dtype of gradient reduction."""
SUMS = {"forward": [("bf16", RANKS - 1)], "backward": [("bf16", RANKS - 1)], "autocast": [("fp32", RANKS - 1)],
        "gains": [("fp32", RANKS - 1), ("bf16", 1)]}
"""Roundings of each tensor-parallel sum. Gradients of gains are summed in fp32, then rounded."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    need_mpiexec()
    folder = tmp_path_factory.mktemp("reduced")
    return results_of(HELPERS / "reduced_value_ranks.py", folder, ["tp", *RUNS], RANKS)


def bound(*roundings: tuple[str, int]) -> float:
    """Return the bound on the error of a sum, relative to the sum of its inputs' absolute values.

    Each rounding multiplies by 1 + d, |d| <= u. So the result is the exact sum of inputs that are each multiplied
    by at most k such factors, in any order (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).

    Args:
        roundings: dtypes, each with the number of roundings of an input.
    """
    factor = 1.0
    for dtype, count in roundings:
        factor *= (1 + ROUNDOFF[dtype]) ** count
    return factor - 1


@pytest.mark.parametrize("run", RUNS)
def test_reduced_gradients_are_sums_of_the_ranks_gradients(results: dict[str, Any], run: str) -> None:
    """Check the gradients that the optimizer gets. Measured: 0.09 to 0.9 of the bound.

    A gradient is rounded to the dtype of the reduction and in N - 1 additions, to the dtype of the accumulation and
    in M - 1 additions. Dividing by N = 4 ranks and M = 2 micro-steps is exact.
    """
    _, accumulated, reduced = run.split(":")
    assert results[run] <= bound((reduced, RANKS), (accumulated, MICRO_STEPS))


@pytest.mark.parametrize("name", SUMS)
def test_sums_over_tensor_parallel_ranks_are_exact_up_to_rounding(results: dict[str, Any], name: str) -> None:
    assert results["tp"][name] <= bound(*SUMS[name])
