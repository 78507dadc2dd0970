"""Confidence intervals of a measured time and of a ratio of two: Student's t on logarithms (no torch).

A run's step time is the median of its steady steps. The runs of a point differ by more than their steps do (another
placement, another neighbour on the network), so that with several runs *runs* are what is counted: the steps of one
run are not independent, however many. Times are compared as ratios, hence logarithms.

With a single run only its steps can be counted. They are cut into stretches in order, whose medians are nearly
independent where steps that follow each other are not (batch means, Conway 1963). Such an interval leaves out what
differs from run to run; `Estimate.basis` says which of both it is.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CONFIDENCE = 0.95
"""Coverage that intervals and bands are made for. Of 500 simulated ratios each, of points whose runs differ by 2 %
(or three times as much at one of both), the interval held the truth in 95 to 97 % with 3 or 5 runs a point, in 97
to 98 % with 2 (it is very wide then), and with the steps of one run, correlated by 0.5 with the one before, in 93 %
(benchmarks/scaling_coverage.py)."""

Basis = Literal["runs", "steps", "none"]

_STRETCHES = 8
_LEAST_STEPS = 16
_QUADRATURE = 200  # even; gives eight digits up to the freedom below
_AS_GOOD_AS_NORMAL = 500.0


@dataclass(frozen=True)
class Estimate:
    """A positive value with what is known of its error.

    Attributes:
        log: natural logarithm of the value.
        variance: of `log`.
        freedom: degrees of freedom of `variance`; 0 where there is none.
        basis: what was counted: several runs, the steps of one, or nothing (too few steps).
    """

    log: float
    variance: float
    freedom: float
    basis: Basis

    @property
    def value(self) -> float:
        return math.exp(self.log)

    @property
    def error(self) -> float | None:
        """Relative standard error, None where nothing is known."""
        return math.sqrt(self.variance) if self.freedom else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval at CONFIDENCE, None where nothing is known."""
        if not self.freedom:
            return None
        reach = student_quantile(CONFIDENCE, self.freedom) * math.sqrt(self.variance)
        return math.exp(self.log - reach), math.exp(self.log + reach)


def estimate(runs: Sequence[Sequence[float]]) -> Estimate:
    """The time of a step from the steady steps of each run, at least one run with at least one step: the geometric
    mean of the runs' medians."""
    logs = [math.log(statistics.median(steps)) for steps in runs]
    if len(logs) > 1:
        return Estimate(statistics.fmean(logs), statistics.variance(logs) / len(logs), len(logs) - 1, "runs")
    steps = runs[0]
    if len(steps) < _LEAST_STEPS:
        return Estimate(logs[0], 0.0, 0, "none")
    edges = [round(i * len(steps) / _STRETCHES) for i in range(_STRETCHES + 1)]
    parts = [math.log(statistics.median(steps[a:b])) for a, b in itertools.pairwise(edges)]
    return Estimate(logs[0], statistics.variance(parts) / _STRETCHES, _STRETCHES - 1, "steps")


def ratio(above: Estimate, below: Estimate, factor: float = 1.0) -> Estimate:
    """factor x above / below of two that were measured apart, with Welch's degrees of freedom (Welch 1947)."""
    log = math.log(factor) + above.log - below.log
    if not (above.freedom and below.freedom):
        return Estimate(log, 0.0, 0, "none")
    variance = above.variance + below.variance
    parts = above.variance**2 / above.freedom + below.variance**2 / below.freedom
    freedom = variance**2 / parts if parts > 0 else min(above.freedom, below.freedom)
    basis: Basis = "runs" if above.basis == below.basis == "runs" else "steps"
    return Estimate(log, variance, freedom, basis)


@functools.lru_cache(maxsize=1024)
def student_quantile(confidence: float, freedom: float) -> float:
    """The t that |T| stays below with probability `confidence`, for at least one degree of freedom.

    With t = sqrt(freedom) tan(a) the density becomes cos(a)^(freedom - 1), smooth on [0, pi/2]; Simpson's rule and
    bisection do the rest.
    """
    power = min(freedom, _AS_GOOD_AS_NORMAL) - 1

    def area(angle: float) -> float:
        step = angle / _QUADRATURE
        weights = (1 if i in (0, _QUADRATURE) else 4 if i % 2 else 2 for i in range(_QUADRATURE + 1))
        return step / 3 * sum(weight * max(math.cos(i * step), 0.0) ** power
                              for i, weight in enumerate(weights))

    wanted = confidence * area(math.pi / 2)
    low, high = 0.0, math.pi / 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if area(middle) < wanted else (low, middle)
    return math.sqrt(power + 1) * math.tan((low + high) / 2)
