"""Points of a study, their efficiency against the smallest of the same kind, confidence intervals (no torch).

Intervals are Student's t on logarithms. A run's step time is the median of its steady steps. The runs of a point
differ by more than their steps do (another placement, another neighbour on the network), so that with several runs
*runs* are what is counted: the steps of one run are not independent, however many. Times are compared as ratios,
hence logarithms.

With a single run only its steps can be counted. They are cut into stretches in order, whose medians are nearly
independent where steps that follow each other are not (batch means, Conway 1963). Such an interval leaves out what
differs from run to run; `Estimate.basis` says which of both it is.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ezpz_llm.base import grouped
from ezpz_llm.observe.history import Spread, finite, spread
from ezpz_llm.scaling.study import SPLIT, Mode, Repeat

CONFIDENCE = 0.95
"""Coverage that intervals and bands are made for. Of 500 simulated ratios each, of points whose runs differ by 2 %
(or three times as much at one of both), the interval held the truth in 95 to 97 % with 3 or 5 runs a point, in 97
to 98 % with 2 (it is very wide then), and with the steps of one run, correlated by 0.5 with the one before, in 93 %
(benchmarks/scaling_coverage.py)."""

Basis = Literal["runs", "steps", "none"]

_STRETCHES = 8
_LEAST_STEPS = 16
_ANGLES = np.linspace(0.0, math.pi / 2, 20_001)  # gives four digits at least, up to the freedom below
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
        """The value itself."""
        return math.exp(self.log)

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

    With t = sqrt(freedom) tan(a) the density becomes cos(a)^(freedom - 1) on [0, pi/2]; its integral is inverted.
    """
    power = min(freedom, _AS_GOOD_AS_NORMAL) - 1
    density = np.cos(_ANGLES) ** power
    area = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))
    return math.sqrt(power + 1) * math.tan(np.interp(confidence * area[-1], area, _ANGLES))


# Points with their efficiency.
Unit = Literal["nodes", "ranks"]

DISAGREEING = 1.3
"""Runs of a point that differ by more are not runs of the same thing."""


@dataclass(frozen=True)
class Measured:
    """All repeats of one point; `good` has those that finished, in the order of their numbers."""

    name: str
    mode: Mode
    ds_config: str
    nodes: int
    ranks: int
    repeats: tuple[Repeat, ...]

    @property
    def first(self) -> Repeat:
        """A repeat to ask for what all have in common."""
        return (self.good or self.repeats)[0]

    @property
    def good(self) -> tuple[Repeat, ...]:
        """The repeats that finished and have a steady step."""
        return tuple(one for one in self.repeats if one.error is None and one.step_times_s)

    @property
    def errors(self) -> tuple[str, ...]:
        """Why repeats failed, each reason once."""
        said = [one.error or "no steady step was measured" for one in self.repeats if one not in self.good]
        return tuple(dict.fromkeys(said))

    @property
    def step_time(self) -> Estimate:
        """Seconds of a step: the geometric mean of the runs' medians. Only of a point with a good repeat."""
        return estimate([one.step_times_s for one in self.good])

    @property
    def steps(self) -> Spread:
        """All steady steps of all runs in seconds: median, and what a tenth lies below and above."""
        return spread([seconds for one in self.good for seconds in one.step_times_s])

    @property
    def disagreement(self) -> float:
        """The slowest run's median step over the fastest one's."""
        medians = [statistics.median(one.step_times_s) for one in self.good]
        return max(medians) / min(medians)

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks, at the point's step time."""
        return self.first.step_tokens / self.step_time.value

    @property
    def tokens_per_second_per_device(self) -> float:
        """The same over the number of ranks."""
        return self.tokens_per_second / self.ranks

    @property
    def mfu(self) -> float | None:
        """The median over runs, as a fraction."""
        known = [one.mfu for one in self.good if one.mfu is not None]
        return statistics.median(known) if known else None

    @property
    def peak_device_bytes(self) -> int | None:
        """Of the rank and run that took most; None where no device has memory of its own."""
        return max((one.peak_device_bytes for one in self.good if one.peak_device_bytes), default=None)

    @property
    def peak_host_bytes(self) -> int | None:
        """Host memory of the rank and run that took most."""
        return max((one.peak_host_bytes for one in self.good if one.peak_host_bytes), default=None)

    @property
    def split(self) -> dict[str, float] | None:
        """Seconds a step under the keys SPLIT, the mean over the runs that were traced."""
        known = [one.split for one in self.good if one.split]
        return {key: statistics.fmean(one[key] for one in known) for key in SPLIT} if known else None

    @property
    def slowest(self) -> tuple[int | None, str | None, int]:
        """Rank and host that were the slowest in most runs, and in how many; ties go to the earlier run."""
        (rank, host), times = Counter((one.slowest_rank, one.slowest_host) for one in self.good).most_common(1)[0]
        return rank, host, times

    @property
    def learnt(self) -> bool:
        """True if the loss fell in every run: the speed of one where it did not says nothing."""
        return all(finite(one.first_loss) and finite(one.last_loss) and one.last_loss < one.first_loss
                   for one in self.good)


@dataclass(frozen=True)
class Curve:
    """The points of one mode and layout that have a number, from the smallest on (at least one)."""

    mode: Mode
    ds_config: str
    points: tuple[Measured, ...]

    @property
    def base(self) -> Measured:
        """The smallest point, which the others are compared with."""
        return self.points[0]

    @property
    def name(self) -> str:
        """Its mode and layout, such as `weak ddp`."""
        return f"{self.mode} {self.ds_config}"

    @property
    def unit(self) -> Unit:
        """Unit of the sizes: nodes, if there are several and all have equally many ranks."""
        per_node = {point.ranks / point.nodes for point in self.points}
        return "nodes" if len(per_node) == 1 and self.points[-1].nodes > 1 else "ranks"

    def size(self, point: Measured) -> int:
        """The point's size in the curve's unit."""
        return point.nodes if self.unit == "nodes" else point.ranks

    def efficiency(self, point: Measured) -> Estimate:
        """Tokens a second and device over the smallest point's. Under strong scaling that is the speed-up over the
        ratio of ranks; under weak scaling the ratio of step times. The smallest point's own is 1 by definition."""
        if point is self.base:
            return Estimate(0.0, 0.0, 0, "none")
        work = point.first.step_tokens / point.ranks * self.base.ranks / self.base.first.step_tokens
        return ratio(self.base.step_time, point.step_time, work)

    def speed_up(self, point: Measured) -> float:
        """Tokens a second over the smallest point's."""
        return point.tokens_per_second / self.base.tokens_per_second

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes where the curve is less than its name says."""
        found = []
        per_rank = {point.first.step_tokens * self.base.ranks / point.ranks for point in self.points}
        batches = {point.first.step_tokens for point in self.points}
        if self.mode == "weak" and len(per_rank) > 1:
            found.append("not weak scaling: the tokens of a step and device differ between its points")
        if self.mode == "strong" and len(batches) > 1:
            found.append("not strong scaling: the tokens of a step differ between its points")
        found += [f"{point.name}: the loss did not fall, so its speed says nothing"
                  for point in self.points if not point.learnt]
        found += [f"{point.name}: its slowest run took {point.disagreement:.1f} times as long as its fastest: "
                  "something else was at work there; look at its runs, and measure the point again"
                  for point in self.points if point.disagreement > DISAGREEING]
        found += [f"{point.name}: {len(point.repeats) - len(point.good)} of {len(point.repeats)} runs failed"
                  for point in self.points if len(point.good) < len(point.repeats)]
        return tuple(found)


def points_of(repeats: Iterable[Repeat]) -> list[Measured]:
    """The points, by mode, layout and size."""
    groups = grouped(((one.point, one.mode, one.ds_config, one.nodes, one.ranks), one) for one in repeats)
    points = [Measured(*what, tuple(sorted(group, key=lambda one: one.repeat))) for what, group in groups.items()]
    order = {name: i for i, name in enumerate(dict.fromkeys(point.ds_config for point in points))}
    return sorted(points, key=lambda one: (one.mode != "weak", order[one.ds_config], one.ranks, one.nodes))


def curves_of(points: Sequence[Measured]) -> list[Curve]:
    """A curve for each mode and layout that has a point with a number."""
    groups = grouped(((point.mode, point.ds_config), point) for point in points if point.good)
    return [Curve(mode, ds_config, tuple(group)) for (mode, ds_config), group in groups.items()]
