"""The step-time model: fitted to a study's points, what it predicts with a band, and why a speed-up is superlinear.

A few points cannot say which terms there are. So each combination of TERMS is fitted, with coefficients that are
not negative, and weighed by Akaike's criterion; the best one is shown, and all of them make the band. What noise
does to them is seen by fitting them again to studies drawn with the measured errors (no torch).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ezpz_llm.base import UserError
from ezpz_llm.base.shell_commands import typable
from ezpz_llm.rundir import RunDir, read_layout
from ezpz_llm.scaling.efficiency import CONFIDENCE, DISAGREEING, Curve, Estimate, Measured

TERMS = ("work", "serial", "divided", "bandwidth", "latency, tree", "latency, ring")
"""At most one of the two latencies is in a model; some work or serial part there always is."""

LEAST_SIZES = 3
REACH = 4
"""Times the largest measured size; beyond it nothing is said."""

_DRAWS = 1000
_FLOOR = 1e-3
"""The least relative error of a point: no model is truer than this."""
_ALIKE = 1e-6  # of singular values: terms that cannot be told apart at these points

Band = tuple[float, float]


@dataclass(frozen=True)
class Shape:
    """Features of a layout in the step-time model: pipeline stages; are gradients reduced once a micro-step; is
    the optimizer state sharded over data-parallel ranks? `within` is how many neighbours share all shards, if not
    all ranks do: shards are gathered and scattered among them, then all-reduced across their groups."""

    pp: int = 1
    per_micro_step: bool = False
    divides: bool = False
    within: int | None = None


def shape_of(run_dir: Path) -> Shape | None:
    """The shape of a run's layout, as its layout.json has it; None where there is none."""
    resolved = read_layout(RunDir(run_dir).layout)
    if resolved is None:
        return None
    layout = resolved["layout"]
    stage = layout.get("zero_stage") or 0
    sharded = layout.get("engine") == "fsdp2"
    return Shape(layout.get("pp", 1), stage >= 2 or sharded, stage >= 1 or sharded,
                 layout.get("shard_within"))


@dataclass(frozen=True)
class Setting:
    """A measured or imagined point: its size in nodes or ranks, d data-parallel ranks, q tokens of a step on each
    rank, `a` micro-steps (not always a whole number: lines are drawn between points). `alone`: nothing leaves the
    node, and what goes round within it is the same at any size."""

    size: float
    dp: float
    tokens: float
    accumulation: float
    alone: bool
    shape: Shape

    @property
    def bubble(self) -> float:
        """The idle time of a pipeline over its work."""
        return (self.shape.pp - 1) / self.accumulation

    @property
    def terms(self) -> np.ndarray:
        """What the coefficients of TERMS are multiplied by."""
        rounds = self.accumulation if self.shape.per_micro_step else 1.0
        group = min(self.shape.within or self.dp, self.dp)
        spread = max(1.0, group * self.size / self.dp)  # nodes (ranks) that a group of neighbours lies on
        return np.array([self.tokens * (1 + self.bubble), 1.0, self.shape.divides / group,
                         0.0 if self.alone else rounds * self._moved(group, spread),
                         rounds * math.log2(self.size), rounds * (spread - 1 + self.size / spread - 1)])

    def _moved(self, group: float, spread: float) -> float:
        """What goes over each link between nodes (ranks), in parts of what a step gathers and scatters: two gathers
        and a scatter of all parameters in a group. What goes round on one node is the same at any size. Across
        groups a shard is all-reduced, so goes round twice."""
        copies = self.dp / group
        inside = (group - 1) / group if spread > 1 else 0.0
        return inside + 2 / (3 * group) * (copies - 1) / copies


def setting_of(curve: Curve, point: Measured, shape: Shape) -> Setting:
    """Return the model's inputs at a measured point."""
    one = point.first
    alone = curve.unit == "nodes" and point.nodes == 1
    return Setting(curve.size(point), one.global_batch / (one.micro_batch * one.accumulation),
                   one.step_tokens / point.ranks, one.accumulation, alone, shape)


def setting_at(curve: Curve, size: float, shape: Shape) -> Setting:
    """Return the model's inputs at another size of the curve: a fixed batch per device, or a fixed global batch."""
    base = setting_of(curve, curve.base, shape)
    grown = size / base.size
    divided = grown if curve.mode == "strong" else 1.0
    return replace(base, size=size, dp=base.dp * grown, tokens=base.tokens / divided,
                   accumulation=max(1.0, base.accumulation / divided), alone=curve.unit == "nodes" and size <= 1)


@dataclass(frozen=True)
class _Model:
    """One combination of terms, by their numbers. Column 0 of `coefficients` (TERMS, 1 + draws) fits the study
    itself, the others drawn ones; so do `scores`, Akaike's, infinite where a coefficient would be negative."""

    terms: tuple[int, ...]
    coefficients: np.ndarray
    scores: np.ndarray

    @property
    def names(self) -> tuple[str, ...]:
        """The terms in use, by name."""
        return tuple(TERMS[number] for number in self.terms)


@dataclass(frozen=True)
class Fitted:
    """A measured point against the best model: seconds measured, and by term."""

    curve: Curve
    point: Measured
    parts: dict[str, float]
    measured: float

    @property
    def seconds(self) -> float:
        """Step time under the best model."""
        return sum(self.parts.values())

    @property
    def deviation(self) -> float:
        """Of the model from the measurement, as a fraction of it."""
        return self.seconds / self.measured - 1


class Fit:
    """The models fitted to all points of one layout, weak and strong together.

    Attributes:
        curves: what was fitted.
        rows: each point against the best model.
        error: root mean square deviation of the best model from the points, as a fraction.
        noise: mean relative standard error of a point, from its runs or steps.
        free: points less terms of the best model; with 0 nothing tests the form, and `error` says nothing.
        terms: those of the best model.
        rivals: other models that the points support about as well (within 2 of Akaike's criterion).
    """

    def __init__(self, curves: Sequence[Curve], shape: Shape, seed: int = 0) -> None:
        """Fit.

        Raises:
            UserError: fewer than LEAST_SIZES sizes, or points of which no error is known.
        """
        self.curves, self.shape = tuple(curves), shape
        pairs = [(curve, point) for curve in curves for point in curve.points]
        _check(pairs)
        settings = [setting_of(curve, point, shape) for curve, point in pairs]
        table = np.array([setting.terms for setting in settings])
        times = np.array([point.step_time.value for _, point in pairs])
        errors, freedom = _pooled([point.step_time for _, point in pairs], [len(point.good) for _, point in pairs])
        rng = np.random.default_rng(seed)
        scale = np.sqrt(freedom / rng.chisquare(freedom, _DRAWS))
        normal = rng.standard_normal((len(pairs), _DRAWS)) * scale

        models = _fit_models(table, times, errors, normal)
        best = models[0]
        self.free = len(pairs) - len(best.terms)
        misfit = (((table @ best.coefficients[:, 0] - times) / (times * errors)) ** 2).sum()
        if misfit > self.free > 0:
            # What no model explains is taken for noise: the band has to hold it.
            errors = errors * np.sqrt(misfit / self.free)
            models = _fit_models(table, times, errors, normal)
        self._best = models[0]
        self._drawn = np.stack([model.coefficients[:, 1:] for model in models])
        self._weights = np.exp([-model.scores[1:] / 2 for model in models])
        self._measured = {id(point): drawn
                          for (_, point), drawn in zip(pairs, _drawn(times, errors, normal), strict=True)}
        self.terms = self._best.names
        self.rivals = tuple(model.names for model in models[1:] if model.scores[0] < self._best.scores[0] + 2)
        self.noise = float(np.sqrt(np.mean(errors**2)))
        self.rows = tuple(Fitted(curve, point, self.parts(setting), float(seconds))
                          for (curve, point), setting, seconds in zip(pairs, settings, times, strict=True))
        self.error = float(np.sqrt(np.mean([row.deviation**2 for row in self.rows])))

    def parts(self, setting: Setting) -> dict[str, float]:
        """Seconds by term under the best model, a pipeline's bubble apart from the work."""
        seconds = (self._best.coefficients[:, 0] * setting.terms).tolist()
        parts = {TERMS[number]: seconds[number] for number in self._best.terms}
        if setting.shape.pp > 1 and "work" in parts:
            parts["bubble"] = parts["work"] * setting.bubble / (1 + setting.bubble)
            parts["work"] -= parts["bubble"]
        return parts

    def seconds(self, setting: Setting) -> float:
        """Step time under the best model."""
        return float(setting.terms @ self._best.coefficients[:, 0])

    def band(self, setting: Setting, over: Measured | None = None) -> Band:
        """The band of the step time at CONFIDENCE; of its ratio to the time measured at `over`, if given."""
        values = setting.terms @ self._drawn
        if over is not None:
            values = values / self._measured[id(over)]
        order = np.argsort(values, axis=None)
        reached = np.cumsum(self._weights.ravel()[order]) / self._weights.sum()
        tail = (1 - CONFIDENCE) / 2
        low, high = order[np.minimum(np.searchsorted(reached, (tail, 1 - tail)), len(order) - 1)]
        return float(values.flat[low]), float(values.flat[high])


def _check(pairs: Sequence[tuple[Curve, Measured]]) -> None:
    sizes = sorted({curve.size(point) for curve, point in pairs})
    if len(sizes) < LEAST_SIZES:
        raise UserError(f"no fit: it needs {LEAST_SIZES} sizes, measured are {', '.join(map(str, sizes))}",
                        instead="more sizes (--nodes 1,2,4)")
    if not all(point.step_time.freedom for _, point in pairs):
        raise UserError("no fit: nothing is known of the error of some points",
                        instead="--repeats 3, or more steps")


def _pooled(estimates: Sequence[Estimate], runs: Sequence[int]) -> tuple[np.ndarray, float]:
    """Relative standard error of each point, with the noise of one run pooled over all that know it, and its
    degrees of freedom. Where some points know how runs differ, only these count: steps of one run differ less."""
    pairs = list(zip(estimates, runs, strict=True))
    counted = [(one, count) for one, count in pairs if one.basis == "runs"] or pairs
    freedoms = [one.freedom for one, _ in counted]
    of_one = float(np.average([one.variance * count for one, count in counted], weights=freedoms))
    return np.maximum(np.sqrt(of_one / np.array(runs, float)), _FLOOR), sum(freedoms)


def _drawn(times: np.ndarray, errors: np.ndarray, normal: np.ndarray) -> np.ndarray:
    """Times (points, draws) of studies as they might have been measured as well."""
    return times[:, None] * np.exp(errors[:, None] * normal)


def _fit_models(table: np.ndarray, times: np.ndarray, errors: np.ndarray, normal: np.ndarray) -> list[_Model]:
    """Least squares with every combination of terms that the points can tell apart, the best first.

    Args:
        table: (points, TERMS).
        normal: (points, draws), the noise of drawn studies in units of `errors`.
    """
    weight = 1 / (times * errors)[:, None]
    data = np.column_stack([times, _drawn(times, errors, normal)]) * weight
    found = []
    for terms in _combinations():
        part = table[:, list(terms)] * weight
        lengths = np.linalg.norm(part, axis=0)
        if (len(terms) > len(times) or not lengths.all()
                or np.linalg.svd(part / lengths, compute_uv=False)[-1] < _ALIKE):
            continue
        coefficients = np.zeros((len(TERMS), data.shape[1]))
        coefficients[list(terms)] = np.linalg.pinv(part) @ data
        misfit = ((part @ coefficients[list(terms)] - data) ** 2).sum(axis=0)
        scores = np.where((coefficients >= 0).all(axis=0), misfit + 2 * len(terms), np.inf)
        found.append(_Model(terms, coefficients, scores))
    return sorted(found, key=lambda one: (round(float(one.scores[0]), 6), len(one.terms)))


def _combinations() -> list[tuple[int, ...]]:
    """The numbers of the terms of every model."""
    work, serial, divided, bandwidth, tree, ring = range(len(TERMS))
    others = (work, serial, divided, bandwidth)
    return [(*some, *latency) for size in range(1, 5) for some in itertools.combinations(others, size)
            if {work, serial} & set(some) for latency in ((), (tree,), (ring,))]


# Other sizes by the fit, and not far beyond what was measured.
@dataclass(frozen=True)
class Prediction:
    """A curve at another size by the fit. Bands are those of the mean over runs, at CONFIDENCE; a single run
    scatters around it. `efficiency` is against the smallest point as measured."""

    curve: Curve
    size: int
    ranks: int
    seconds: float
    seconds_band: Band
    tokens_per_second: float
    efficiency: float
    efficiency_band: Band
    parts: dict[str, float]
    beyond: bool


@dataclass(frozen=True)
class Target:
    """Up to which size a curve's efficiency stays at or above `target`.

    `size` is by the fit, `sure` by the lower edge of its band, `possible` by the upper. Where one of them is
    `limit`, the largest size that may be spoken of, it may be larger.
    """

    curve: Curve
    target: float
    size: int
    sure: int
    possible: int
    limit: int

    def describe(self) -> str:
        """In one sentence."""
        size, sure, possible = (f"{size} or more" if size == self.limit else str(size)
                                for size in (self.size, self.sure, self.possible))
        text = f"efficiency stays at {self.target:.0%} or above up to {size} {self.curve.unit}"
        return text + (f" (between {sure} and {possible} by the band)" if sure != possible else "")


def predict(fit: Fit, curve: Curve, size: int) -> Prediction:
    """The curve at `size` (nodes or ranks, as curve.unit says).

    Raises:
        UserError: the size is smaller than what was measured, more than REACH times the largest, or one at which
            the curve could not be measured.
    """
    if problem := _problem(curve, size):
        raise problem
    ranks = curve.base.ranks * size // curve.size(curve.base)
    setting = setting_at(curve, size, fit.shape)
    seconds = fit.seconds(setting)
    return Prediction(curve, size, ranks, seconds, fit.band(setting), setting.tokens * ranks / seconds,
                      *_efficiency(fit, curve, setting), fit.parts(setting), size > curve.size(curve.points[-1]))


def _problem(curve: Curve, size: int) -> UserError | None:
    """Why nothing is said of a size: too far from what was measured, or the curve could not be measured there."""
    base, largest = curve.base, curve.size(curve.points[-1])
    smallest = curve.size(base)
    if not smallest <= size <= REACH * largest:
        return UserError(f"no prediction for {size} {curve.unit}: measured were {smallest} to {largest}",
                         where=curve.name, instead=f"{smallest} to {REACH * largest} {curve.unit} "
                         f"({REACH} times the largest), or measure a larger point")
    if base.ranks * size % smallest:
        return UserError(f"{size} {curve.unit} are {base.ranks * size / smallest:g} ranks", where=curve.name,
                         instead=f"a multiple of {smallest}")
    one = base.first
    micro_batches = {point.first.micro_batch for point in curve.points}
    # Where they differ, the trainer was free to choose them.
    least = micro_batches.pop() if len(micro_batches) == 1 else 1
    dp = one.global_batch / (one.micro_batch * one.accumulation) * size / smallest
    if curve.mode == "strong" and (dp != int(dp) or one.global_batch % (least * int(dp))):
        return UserError(f"a global batch of {one.global_batch} in micro batches of {least} cannot be divided "
                         f"over {dp:g} data-parallel ranks", where=f"{curve.name} at {size} {curve.unit}",
                         instead="a size that divides it, or a study with another batch")
    return None


def sizes_to_speak_of(curve: Curve) -> list[int]:
    """The sizes that `predict` answers for."""
    return [size for size in range(1, REACH * curve.size(curve.points[-1]) + 1) if _problem(curve, size) is None]


def find_target(fit: Fit, curve: Curve, target: float) -> Target:
    """Find the size at which efficiency falls under `target`, among the sizes at which the curve could be measured.

    Raises:
        UserError: the target is no fraction between 0 and 1.
    """
    if not 0 < target <= 1:
        raise UserError(f"a target efficiency of {target:g}", where="--target", instead="a fraction such as 0.8")
    sizes = sizes_to_speak_of(curve)
    found = [_efficiency(fit, curve, setting_at(curve, size, fit.shape)) for size in sizes]

    def last(values: Sequence[float]) -> int:
        # The first failure counts: a model may rise again where fewer micro-steps are left. At the smallest size
        # efficiency is 1 by definition, whatever the band of the fit there.
        under = next((i for i, value in enumerate(values[1:], 1) if value < target), len(values))
        return sizes[under - 1]

    middle, low, high = zip(*((one, *band) for one, band in found), strict=True)
    return Target(curve, target, last(middle), last(low), last(high), sizes[-1])


def line(fit: Fit, curve: Curve, points: int = 60) -> list[tuple[float, float, Band]]:
    """(size, efficiency, band) from the smallest size to the largest that may be spoken of, to be drawn."""
    sizes = np.linspace(curve.size(curve.base), sizes_to_speak_of(curve)[-1], points + 1).tolist()
    return [(size, *_efficiency(fit, curve, setting_at(curve, size, fit.shape))) for size in sizes]


def _efficiency(fit: Fit, curve: Curve, setting: Setting) -> tuple[float, Band]:
    base = curve.base
    work = setting.tokens / (base.first.step_tokens / base.ranks)
    low, high = fit.band(setting, over=base)
    return work * base.step_time.value / fit.seconds(setting), (work / high, work / low)


# Superlinear speed-up, an efficiency above 100 %: more devices did not make each of them faster.
_LESS = 0.9
"""Memory of a rank that counts as less."""
_SPREAD = 1.2
"""The slowest tenth of steps over the median that counts as unsteady."""


def explain_superlinear(curve: Curve, point: Measured) -> tuple[str, ...]:
    """Return the causes of a superlinear speed-up, the likeliest first; empty only if there is none."""
    efficiency = curve.efficiency(point)
    if point is curve.base or efficiency.value <= 1:
        return ()
    interval = efficiency.interval
    if interval is not None and interval[0] <= 1:
        runs = f", and runs of the smallest point differ by a factor of {curve.base.disagreement:.1f}"
        return (f"within the noise: its interval begins at {interval[0]:.1%}"
                + runs * (curve.base.disagreement > DISAGREEING),)
    found = [*_work(curve.base, point), *_parts(curve.base, point), *_memory(curve.base, point),
             *_unsteady(curve.base)]
    if interval is None:
        found.append("its error is not known (a single short run): measure with --repeats 3")
    if not found:
        found.append(f"not explained: {curve.base.name}, which all others are compared with, is too slow for a "
                     "reason that was not measured; do not use this number before its runs have been looked at "
                     f"({typable(f'ezpz-llm explain {curve.base.first.run_dir}')})")
    return tuple(found)


def explain_predicted(fit: Fit, one: Prediction) -> str | None:
    """Return the cause of a superlinear prediction; None if it is not above 100 %."""
    if one.efficiency <= 1:
        return None
    if one.efficiency_band[0] <= 1:
        return f"within the noise: its band begins at {one.efficiency_band[0]:.1%}"
    curve = one.curve
    before, base = fit.parts(setting_of(curve, curve.base, fit.shape)), curve.base
    work = base.tokens_per_second_per_device * base.step_time.value * one.ranks / (
        one.tokens_per_second * one.seconds)
    gains = {part: seconds - one.parts.get(part, 0.0) * work for part, seconds in before.items()}
    part, gain = max(gains.items(), key=lambda item: item[1])
    if gain * 2 < base.step_time.value - one.seconds * work:
        return f"not explained: {base.name}, which it is compared with, is slower than the fit; do not use it"
    return (f"what the fit calls {part} takes {gain * 1e3:.1f} ms a step less for the same tokens"
            + (": the optimizer's state is divided over more ranks" if part == "divided" else ""))


def _work(base: Measured, point: Measured) -> list[str]:
    """Another amount of work for the same tokens."""
    one, other = base.first, point.first
    found = []
    if other.accumulation < one.accumulation:
        found.append(f"fewer micro-steps a step ({other.accumulation}, at the smallest point {one.accumulation}): "
                     "what each costs besides its tokens is paid less often")
    if other.micro_batch > one.micro_batch:
        found.append(f"a larger micro batch ({other.micro_batch}, at the smallest point {one.micro_batch}) "
                     "keeps a device busier")
    if other.ranks / other.nodes < one.ranks / one.nodes:
        found.append(f"fewer ranks a node ({other.ranks / other.nodes:g}, at the smallest point "
                     f"{one.ranks / one.nodes:g}) share its memory and cores")
    return found


def _parts(base: Measured, point: Measured) -> list[str]:
    """Parts of the traced step that got shorter for the same tokens, if they make up for a tenth of the gain."""
    before, after = base.split, point.split
    if before is None or after is None:
        return []
    work = base.first.step_tokens / base.ranks * point.ranks / point.first.step_tokens
    gains = {part: before[part] - after[part] * work for part in before}
    gain = base.step_time.value - point.step_time.value * work
    why = {"optimizer": "its state is divided over more ranks", "data": "less of it to read a rank",
           "compute": "smaller tensors stay in the caches, or the smallest point ran on slower or hotter cores"}
    return [f"{part} takes {seconds * 1e3:.1f} ms a step less for the same tokens"
            + (f" ({why[part]})" if part in why else "")
            for part, seconds in sorted(gains.items(), key=lambda item: -item[1]) if seconds > max(gain, 0) / 10]


def _memory(base: Measured, point: Measured) -> list[str]:
    found = []
    for kind in ("device", "host"):
        before, after = (getattr(one, f"peak_{kind}_bytes") for one in (base, point))
        if before and after and after < _LESS * before:
            found.append(f"a rank takes {after / 2**30:.2f} GiB of {kind} memory, at the smallest point "
                         f"{before / 2**30:.2f}: that may have been short of it, or beyond its caches")
    return found


def _unsteady(base: Measured) -> list[str]:
    steps = base.steps
    if steps.high > _SPREAD * steps.median:
        return [f"the smallest point was not steady: a tenth of its steps took longer than {steps.high * 1e3:.1f} "
                f"ms, the median is {steps.median * 1e3:.1f}"]
    return []
