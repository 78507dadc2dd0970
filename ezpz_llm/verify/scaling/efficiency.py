"""Scaling efficiency of a study's points against the smallest one, with confidence intervals (no torch).

Intervals use Student's t on logarithms, since times are compared as ratios. A run's step time is the median of its
steady steps. With several runs of a point, the sample consists of the runs: they differ by more than the steps of
one run do (placement, network neighbors), and the steps of one run are correlated.

With a single run, the sample consists of its steps. They are divided into consecutive batches whose medians are
nearly independent, although consecutive steps are not (batch means, Conway 1963). Such an interval does not include
the variation between runs. `Estimate.basis` tells the two cases apart.
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

from ezpz_llm.core.base import group_by_key
from ezpz_llm.core.base.shell_commands import to_typable
from ezpz_llm.training.observe.history import Spread, is_finite, spread
from ezpz_llm.verify.scaling.study import SPLIT, Mode, Repeat

CONFIDENCE = 0.95
"""Nominal coverage of intervals.

Measured coverage over 500 simulated ratios, with runs that differ by 2 % (at one of both points also by 6 %): 95
to 97 % with 3 or 5 runs per point; 97 to 98 % with 2, where intervals are very wide; 93 % with the steps of one
run, each correlated by 0.5 with the previous one (benchmarks/scaling_coverage.py).
"""

_MAX_INTERVAL_RATIO = 10.0
"""Maximum ratio of an interval's ends. Wider intervals carry no information, and are neither drawn nor written."""

Basis = Literal["runs", "steps", "none"]

_BATCHES = 8
_MIN_STEPS = 16
_ANGLES = np.linspace(0.0, math.pi / 2, 20_001)  # at least four digits, up to _MAX_FREEDOM
_MAX_FREEDOM = 500.0
"""Student's t with more degrees of freedom is computed with this many: it is nearly normal."""


@dataclass(frozen=True)
class Estimate:
    """Positive value and its error.

    Attributes:
        log: natural logarithm of the value.
        variance: variance of `log`.
        freedom: degrees of freedom of `variance`; 0 if the error is unknown.
        basis: sample behind `variance`: several runs, the steps of one run, or "none" (too few steps).
    """

    log: float
    variance: float
    freedom: float
    basis: Basis

    @property
    def value(self) -> float:
        """Value on the linear scale."""
        return math.exp(self.log)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Confidence interval at CONFIDENCE; None if the error is unknown or the interval is too wide."""
        if not self.freedom:
            return None
        half = student_t_quantile(CONFIDENCE, self.freedom) * math.sqrt(self.variance)
        if 2 * half > math.log(_MAX_INTERVAL_RATIO):
            return None
        return math.exp(self.log - half), math.exp(self.log + half)

    @property
    def is_too_wide(self) -> bool:
        """True if the error is known, but so large that there is no interval."""
        return self.freedom > 0 and self.interval is None


def estimate(runs: Sequence[Sequence[float]]) -> Estimate:
    """Return the step time: the geometric mean of the runs' medians.

    Args:
        runs: steady step times of each run, at least one run with at least one step.
    """
    logs = [math.log(statistics.median(steps)) for steps in runs]
    if len(logs) > 1:
        return Estimate(statistics.fmean(logs), statistics.variance(logs) / len(logs), len(logs) - 1, "runs")
    steps = runs[0]
    if len(steps) < _MIN_STEPS:
        return Estimate(logs[0], 0.0, 0, "none")
    edges = [round(i * len(steps) / _BATCHES) for i in range(_BATCHES + 1)]
    parts = [math.log(statistics.median(steps[a:b])) for a, b in itertools.pairwise(edges)]
    return Estimate(logs[0], statistics.variance(parts) / _BATCHES, _BATCHES - 1, "steps")


def ratio(above: Estimate, below: Estimate, factor: float = 1.0) -> Estimate:
    """Return factor * above / below for independent estimates, with Welch's degrees of freedom (Welch 1947)."""
    log = math.log(factor) + above.log - below.log
    if not (above.freedom and below.freedom):
        return Estimate(log, 0.0, 0, "none")
    variance = above.variance + below.variance
    parts = above.variance**2 / above.freedom + below.variance**2 / below.freedom
    freedom = variance**2 / parts if parts > 0 else min(above.freedom, below.freedom)
    basis: Basis = "runs" if above.basis == below.basis == "runs" else "steps"
    return Estimate(log, variance, freedom, basis)


@functools.lru_cache(maxsize=1024)
def student_t_quantile(confidence: float, freedom: float) -> float:
    """Return the t with P(|T| < t) = `confidence`, for at least one degree of freedom.

    With t = sqrt(freedom) tan(a) the density becomes cos(a)^(freedom - 1) on [0, pi/2]; its integral is inverted.
    """
    power = min(freedom, _MAX_FREEDOM) - 1
    density = np.cos(_ANGLES) ** power
    area = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))
    return math.sqrt(power + 1) * math.tan(np.interp(confidence * area[-1], area, _ANGLES))


Unit = Literal["nodes", "ranks"]

_MAX_DISAGREEMENT = 1.3
"""Step time of a point's slowest run over its fastest, above which the notes warn of a disturbance."""


@dataclass(frozen=True)
class Measured:
    """A point of a study and its repeats, in order of their number."""

    name: str
    mode: Mode
    ds_config: str
    nodes: int
    ranks: int
    repeats: tuple[Repeat, ...]

    @property
    def first(self) -> Repeat:
        """Repeat that supplies the values that all repeats share; a good one if there is any."""
        return (self.good or self.repeats)[0]

    def size(self, unit: Unit) -> int:
        """Return the number of nodes or ranks."""
        return self.nodes if unit == "nodes" else self.ranks

    @property
    def good(self) -> tuple[Repeat, ...]:
        """Repeats that succeeded and have a steady step."""
        return tuple(repeat for repeat in self.repeats if repeat.error is None and repeat.step_times_s)

    @property
    def errors(self) -> tuple[str, ...]:
        """Distinct errors of the failed repeats."""
        errors = [repeat.error or "no steady step was measured" for repeat in self.repeats
                  if repeat not in self.good]
        return tuple(dict.fromkeys(errors))

    @property
    def step_time(self) -> Estimate:
        """Step time in seconds: the geometric mean of the runs' medians. Requires a good repeat."""
        return estimate([repeat.step_times_s for repeat in self.good])

    @property
    def steps(self) -> Spread:
        """Median, 10th and 90th percentile of all steady steps of all runs, in seconds."""
        return spread([seconds for repeat in self.good for seconds in repeat.step_times_s])

    @property
    def disagreement(self) -> float:
        """Median step time of the slowest run divided by that of the fastest."""
        medians = [statistics.median(repeat.step_times_s) for repeat in self.good]
        return max(medians) / min(medians)

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all ranks at the point's step time."""
        return self.first.step_tokens / self.step_time.value

    @property
    def tokens_per_second_per_device(self) -> float:
        """Throughput divided by the number of ranks."""
        return self.tokens_per_second / self.ranks

    @property
    def mfu(self) -> float | None:
        """Median MFU over the runs, as a fraction."""
        values = [repeat.mfu for repeat in self.good if repeat.mfu is not None]
        return statistics.median(values) if values else None

    @property
    def peak_device_bytes(self) -> int | None:
        """Largest device memory peak over ranks and runs; None on CPU."""
        return max((repeat.peak_device_bytes for repeat in self.good if repeat.peak_device_bytes), default=None)

    @property
    def peak_host_bytes(self) -> int | None:
        """Largest CPU memory peak over ranks and runs."""
        return max((repeat.peak_host_bytes for repeat in self.good if repeat.peak_host_bytes), default=None)

    @property
    def split(self) -> dict[str, float] | None:
        """Seconds per step under the keys SPLIT, averaged over the traced runs."""
        splits = [repeat.split for repeat in self.good if repeat.split]
        return {key: statistics.fmean(split[key] for split in splits) for key in SPLIT} if splits else None

    @property
    def slowest(self) -> tuple[int | None, str | None, int]:
        """Rank and hostname that were slowest in most runs, and in how many runs; the earlier run breaks ties."""
        slowest = Counter((repeat.slowest_rank, repeat.slowest_host) for repeat in self.good)
        (rank, host), times = slowest.most_common(1)[0]
        return rank, host, times

    @property
    def loss_decreased(self) -> bool:
        """True if the loss decreased in every run; otherwise the throughput is not meaningful."""
        return all(is_finite(repeat.first_loss) and is_finite(repeat.last_loss)
                   and repeat.last_loss < repeat.first_loss for repeat in self.good)


@dataclass(frozen=True)
class Curve:
    """Measured points of one mode and layout by increasing size, at least one."""

    mode: Mode
    ds_config: str
    points: tuple[Measured, ...]

    @property
    def base(self) -> Measured:
        """Smallest point: the baseline of efficiency and speedup."""
        return self.points[0]

    @property
    def name(self) -> str:
        """Mode and layout, such as `weak ddp`."""
        return f"{self.mode} {self.ds_config}"

    @property
    def unit(self) -> Unit:
        """Unit of the sizes.

        It is "nodes" if all points have the same number of ranks per node and the largest has several nodes.
        """
        per_node = {point.ranks / point.nodes for point in self.points}
        return "nodes" if len(per_node) == 1 and self.points[-1].nodes > 1 else "ranks"

    def size(self, point: Measured) -> int:
        """Return the point's size in the curve's unit."""
        return point.size(self.unit)

    def efficiency(self, point: Measured) -> Estimate:
        """Return tokens/s per device relative to the smallest point, whose efficiency is 1 by definition.

        Under strong scaling this is the speedup divided by the ratio of ranks; under weak scaling the ratio of
        step times.
        """
        if point is self.base:
            return Estimate(0.0, 0.0, 0, "none")
        work = point.first.step_tokens / point.ranks * self.base.ranks / self.base.first.step_tokens
        return ratio(self.base.step_time, point.step_time, work)

    def speed_up(self, point: Measured) -> float:
        """Return tokens/s relative to the smallest point."""
        return point.tokens_per_second / self.base.tokens_per_second

    def superlinear_note(self, point: Measured) -> str | None:
        """Return a note on an efficiency above 100 %, which more devices cannot cause; None if it is not above."""
        efficiency = self.efficiency(point)
        if point is self.base or efficiency.value <= 1:
            return None
        if efficiency.is_too_wide or (efficiency.interval is not None and efficiency.interval[0] <= 1):
            return f"its efficiency of {efficiency.value:.1%} is within the noise of 100 %"
        if efficiency.interval is None:
            return (f"its efficiency of {efficiency.value:.1%} is above 100 %, but its error is unknown: "
                    "measure with --repeats 3")
        return (f"its efficiency of {efficiency.value:.1%} is above 100 %, so the baseline {self.base.name} does "
                "more work per token, was disturbed, or lacked memory or cache. Compare it with "
                f"{to_typable(f'ezpz-llm explain {self.base.first.run_dir}')}")

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings about points that are not comparable, were disturbed, or have failed runs."""
        notes = []
        per_rank = {point.first.step_tokens * self.base.ranks / point.ranks for point in self.points}
        batches = {point.first.step_tokens for point in self.points}
        if self.mode == "weak" and len(per_rank) > 1:
            notes.append("not weak scaling: the tokens per step and device differ between its points")
        if self.mode == "strong" and len(batches) > 1:
            notes.append("not strong scaling: the tokens per step differ between its points")
        notes += [f"{point.name}: the loss did not decrease, so its throughput is not meaningful"
                  for point in self.points if not point.loss_decreased]
        notes += [f"{point.name}: its slowest run took {point.disagreement:.1f} times as long as its fastest. "
                  "Something disturbed it: check its runs, and measure the point again"
                  for point in self.points if point.disagreement > _MAX_DISAGREEMENT]
        notes += [f"{point.name}: {len(point.repeats) - len(point.good)} of {len(point.repeats)} runs failed"
                  for point in self.points if len(point.good) < len(point.repeats)]
        return tuple(notes)


def shared_unit(curves: Iterable[Curve]) -> Unit:
    """Return the unit for a table or figure of several curves: "nodes" if all of them have it."""
    return "nodes" if all(curve.unit == "nodes" for curve in curves) else "ranks"


def points_of(repeats: Iterable[Repeat]) -> list[Measured]:
    """Group repeats into points, sorted by mode, layout and size."""
    groups = group_by_key(((repeat.point, repeat.mode, repeat.ds_config, repeat.nodes, repeat.ranks), repeat)
                          for repeat in repeats)
    points = [Measured(*key, tuple(sorted(group, key=lambda repeat: repeat.repeat)))
              for key, group in groups.items()]
    order = {name: i for i, name in enumerate(dict.fromkeys(point.ds_config for point in points))}
    return sorted(points, key=lambda point: (point.mode != "weak", order[point.ds_config], point.ranks,
                                             point.nodes))


def curves_of(points: Sequence[Measured]) -> list[Curve]:
    """Return a curve for each mode and layout with a measured point."""
    groups = group_by_key(((point.mode, point.ds_config), point) for point in points if point.good)
    return [Curve(mode, ds_config, tuple(group)) for (mode, ds_config), group in groups.items()]
