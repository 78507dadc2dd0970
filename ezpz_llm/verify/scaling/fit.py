"""Extrapolation of a curve to larger sizes by a least-squares fit of its step time (no torch).

    t(n) = single / n + limit (n - 1) / n + doubling log2 n

n is the size in nodes or ranks. single / n plus a constant is Amdahl's law (AFIPS 1967). The traffic of a ring is
proportional to (n - 1) / n (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009), and log2 n is the number of
rounds of a tree (Thakur, Rabenseifner and Gropp, IJHPCA 19, 2005). Since 1 is the sum of the first two terms, the
formula equals a + b / n + c log2 n, where b may be negative. The few sizes of a study cannot tell more terms apart.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from ezpz_llm.core.base import UserError
from ezpz_llm.verify.scaling.efficiency import Curve

FORMULA = "t(n) = single/n + limit (n-1)/n + doubling log2 n"
MAX_EXTRAPOLATION = 4
"""Largest size of an extrapolation, as a multiple of the largest measured size."""
_MIN_SIZES = 3  # as many as terms


@dataclass(frozen=True)
class Fit:
    """Fitted step time of a curve.

    Attributes:
        single, limit, doubling: seconds of each term of FORMULA.
        residual: root mean square of the relative deviations from the points.
    """

    curve: Curve
    single: float
    limit: float
    doubling: float
    residual: float

    def seconds(self, size: float) -> float:
        """Return the fitted step time at a size."""
        return self.single / size + self.limit * (1 - 1 / size) + self.doubling * math.log2(size)

    @property
    def is_exact(self) -> bool:
        """True if there are as many terms as sizes, so the residual does not test the fit."""
        return len(self.curve.points) == sum(seconds > 0 for seconds in (self.single, self.limit, self.doubling))


@dataclass(frozen=True)
class Extrapolation:
    """Step time of a fit at one size. `efficiency` is relative to the smallest measured point."""

    fit: Fit
    size: int
    ranks: int
    seconds: float
    tokens_per_second: float
    efficiency: float


def fit_curve(curve: Curve) -> Fit:
    """Fit the step times of a curve: least squares of relative deviations with nonnegative coefficients.

    Raises:
        UserError: the curve has fewer sizes than the fit has terms.
    """
    sizes = np.array([curve.size(point) for point in curve.points], float)
    if len(sizes) < _MIN_SIZES:
        raise UserError(f"no fit: it requires {_MIN_SIZES} sizes, and the study has "
                        f"{', '.join(f'{size:g}' for size in sizes)}", where=curve.name,
                        instead=f"more sizes (--{curve.unit} 1,2,4)")
    times = np.array([point.step_time.value for point in curve.points])
    table = np.column_stack([1 / sizes, 1 - 1 / sizes, np.log2(sizes)]) / times[:, None]
    fits = []
    # The nonnegative solution is the best of the unconstrained ones for each set of terms.
    for count in (1, 2, 3):
        for terms in map(list, itertools.combinations(range(3), count)):
            coefficients = np.zeros(3)
            coefficients[terms] = np.linalg.lstsq(table[:, terms], np.ones(len(times)), rcond=None)[0]
            if (coefficients >= 0).all():
                residual = float(np.sqrt(np.mean((table @ coefficients - 1) ** 2)))
                single, limit, doubling = coefficients.tolist()
                fits.append(Fit(curve, single, limit, doubling, residual))
    return min(fits, key=lambda fit: fit.residual)


def extrapolate(fit: Fit, size: int) -> Extrapolation:
    """Return the fitted step time at `size`, in the curve's unit.

    Raises:
        UserError: the size is out of range, or the batch cannot be divided over its ranks.
    """
    curve, base = fit.curve, fit.curve.base
    smallest, largest = curve.size(base), curve.size(curve.points[-1])
    if not smallest <= size <= MAX_EXTRAPOLATION * largest:
        raise UserError(f"no extrapolation to {size} {curve.unit}: the study measured {smallest} to {largest}",
                        where=curve.name, instead=f"{smallest} to {MAX_EXTRAPOLATION * largest} {curve.unit} "
                        f"({MAX_EXTRAPOLATION} times the largest), or measure a larger point")
    repeat, growth = base.first, size / smallest
    dp_size = repeat.global_batch / (repeat.micro_batch * repeat.accumulation) * growth
    if dp_size % 1:
        raise UserError(f"{size} {curve.unit} are {dp_size:g} data-parallel ranks", where=curve.name,
                        instead=f"a multiple of {smallest}")
    if curve.mode == "strong" and repeat.global_batch % dp_size:
        raise UserError(f"a global batch of {repeat.global_batch} cannot be divided over {dp_size:g} data-parallel "
                        "ranks", where=f"{curve.name} at {size} {curve.unit}",
                        instead="a size that divides the batch, or a study with another --global-batch-size")
    seconds, ranks = fit.seconds(size), round(base.ranks * growth)
    tokens_per_second = repeat.step_tokens * (growth if curve.mode == "weak" else 1) / seconds
    return Extrapolation(fit, size, ranks, seconds, tokens_per_second,
                         tokens_per_second / ranks / base.tokens_per_second_per_device)
