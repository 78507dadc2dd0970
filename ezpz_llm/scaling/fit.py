"""Step-time models over size, fitted and weighed, and predictions with a band (no torch).

A few points cannot say which terms there are. So each combination of terms is fitted, with coefficients
that are not negative, and weighed by Akaike's criterion; the best one is shown, and all of them make the band. What
noise does to them is seen by fitting them again to studies drawn with the measured errors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ezpz_llm.base.errors import UserError
from ezpz_llm.rundir import RunDir, read_layout
from ezpz_llm.scaling.confidence import CONFIDENCE, Estimate
from ezpz_llm.scaling.efficiency import Curve, Measured


# The step-time model: its terms and their inputs.
@dataclass(frozen=True)
class Shape:
    """Features of a layout in the step-time model: pipeline stages; are gradients reduced once a micro-step; is
    the optimizer state sharded over data-parallel ranks?"""

    pp: int = 1
    per_micro_step: bool = False
    divides: bool = False


def shape_of(run_dir: Path) -> Shape | None:
    """The shape of a run's layout, as its layout.json has it; None where there is none."""
    resolved = read_layout(RunDir(run_dir).layout)
    if resolved is None:
        return None
    layout = resolved["layout"]
    stage = layout.get("zero_stage") or 0
    sharded = layout.get("engine") == "fsdp2"
    return Shape(layout.get("pp", 1), stage >= 2 or sharded, stage >= 1 or sharded)


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
    def rounds(self) -> float:
        return self.accumulation if self.shape.per_micro_step else 1.0

    @property
    def bubble(self) -> float:
        """The idle time of a pipeline over its work."""
        return (self.shape.pp - 1) / self.accumulation


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


def check_divides(curve: Curve, size: int) -> None:
    """Refuse a size at which the curve could not be measured.

    Raises:
        UserError: the fixed global batch cannot be divided there.
    """
    if curve.mode == "weak":
        return
    one = curve.base.first
    micro_batches = {point.first.micro_batch for point in curve.points}
    # Where they differ, the trainer was free to choose them.
    least = micro_batches.pop() if len(micro_batches) == 1 else 1
    dp = one.global_batch / (one.micro_batch * one.accumulation) * size / curve.size(curve.base)
    if dp != int(dp) or one.global_batch % (least * int(dp)):
        raise UserError(f"a global batch of {one.global_batch} in micro batches of {least} cannot be divided "
                        f"over {dp:g} data-parallel ranks", where=f"{curve.name} at {size} {curve.unit}",
                        instead="a size that divides it, or a study with another batch")


Term = Callable[[Setting], float]

TERMS: dict[str, Term] = {
    "work": lambda at: at.tokens * (1 + at.bubble),
    "serial": lambda at: 1.0,
    "divided": lambda at: 1 / at.dp if at.shape.divides else 0.0,
    "bandwidth": lambda at: 0.0 if at.alone else at.rounds * (at.dp - 1) / at.dp,
    "latency, tree": lambda at: at.rounds * math.log2(at.size),
    "latency, ring": lambda at: at.rounds * (at.size - 1),
}
"""By name; at most one of the two latencies is in a model."""


LEAST_SIZES = 3
_DRAWS = 1000
_FLOOR = 1e-3
"""The least relative error of a point: no model is truer than this."""
_ALIKE = 1e-6  # of singular values: terms that cannot be told apart at these points


@dataclass(frozen=True)
class _Model:
    """One combination of terms. `coefficients` (k) fit the data, `drawn` (k, draws) the drawn studies; `weights`
    (draws) are relative, 0 where a coefficient would be negative."""

    terms: tuple[str, ...]
    coefficients: np.ndarray
    score: float
    drawn: np.ndarray
    weights: np.ndarray

    def at(self, setting: Setting) -> np.ndarray:
        return np.array([TERMS[name](setting) for name in self.terms])


@dataclass(frozen=True)
class Fitted:
    """A measured point against the best model: seconds measured, and by term."""

    curve: Curve
    point: Measured
    parts: dict[str, float]
    measured: float

    @property
    def seconds(self) -> float:
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
    """

    def __init__(self, curves: Sequence[Curve], shape: Shape, seed: int = 0) -> None:
        """Fit.

        Raises:
            UserError: fewer than LEAST_SIZES sizes, or points of which no error is known.
        """
        self.curves, self.shape = tuple(curves), shape
        pairs = [(curve, point) for curve in curves for point in curve.points]
        _check(pairs)
        self._settings = [setting_of(curve, point, shape) for curve, point in pairs]
        estimates = [point.step_time for _, point in pairs]
        times = np.array([one.value for one in estimates])
        freedom = sum(one.freedom for one in _counted(estimates))
        errors = _pooled(estimates, [len(point.good) for _, point in pairs])
        rng = np.random.default_rng(seed)
        scale = np.sqrt(freedom / rng.chisquare(freedom, _DRAWS))
        normal = rng.standard_normal((len(pairs), _DRAWS)) * scale

        models = self._fit_all(times, errors, normal)
        best = models[0]
        self.free = len(pairs) - len(best.terms)
        if self.free > 0 and (misfit := _misfit(best, self._settings, times, errors) / self.free) > 1:
            # What no model explains is taken for noise: the band has to hold it.
            errors = errors * np.sqrt(misfit)
            models = self._fit_all(times, errors, normal)
        self._models = models
        self._measured = {id(point): seconds * np.exp(errors[i] * normal[i])
                          for i, ((_, point), seconds) in enumerate(zip(pairs, times, strict=True))}
        self.noise = float(np.sqrt(np.mean(errors**2)))
        self.rows = tuple(Fitted(curve, point, self.parts(setting), float(seconds))
                          for (curve, point), setting, seconds in zip(pairs, self._settings, times, strict=True))
        self.error = float(np.sqrt(np.mean([row.deviation**2 for row in self.rows])))

    @property
    def terms(self) -> tuple[str, ...]:
        """Those of the best model."""
        return self._models[0].terms

    @property
    def rivals(self) -> tuple[tuple[str, ...], ...]:
        """Other models that the points support about as well (within 2 of Akaike's criterion)."""
        return tuple(model.terms for model in self._models[1:] if model.score < self._models[0].score + 2)

    def parts(self, setting: Setting) -> dict[str, float]:
        """Seconds by term under the best model, a pipeline's bubble apart from the work."""
        model = self._models[0]
        parts = dict(zip(model.terms, map(float, model.coefficients * model.at(setting)), strict=True))
        if setting.shape.pp > 1 and "work" in parts:
            parts["bubble"] = parts["work"] * setting.bubble / (1 + setting.bubble)
            parts["work"] -= parts["bubble"]
        return parts

    def seconds(self, setting: Setting) -> float:
        """Step time under the best model."""
        model = self._models[0]
        return float(model.coefficients @ model.at(setting))

    def band(self, setting: Setting, over: Measured | None = None) -> tuple[float, float]:
        """The band of the step time at CONFIDENCE; of its ratio to the time measured at `over`, if given."""
        values = [model.at(setting) @ model.drawn for model in self._models]
        if over is not None:
            values = [one / self._measured[id(over)] for one in values]
        return _quantiles(np.concatenate(values), np.concatenate([model.weights for model in self._models]))

    def _fit_all(self, times: np.ndarray, errors: np.ndarray, normal: np.ndarray) -> list[_Model]:
        """All models that can be fitted, the best first."""
        drawn = times[:, None] * np.exp(errors[:, None] * normal)
        fitted = [self._fit(terms, times, errors, drawn) for terms in _combinations()]
        return sorted((one for one in fitted if one is not None),
                      key=lambda one: (not np.isfinite(one.score), round(one.score, 6), len(one.terms)))

    def _fit(self, terms: tuple[str, ...], times: np.ndarray, errors: np.ndarray,
             drawn: np.ndarray) -> _Model | None:
        if len(terms) > len(times):
            return None
        weight = 1 / (times * errors)
        table = np.array([[TERMS[name](setting) for name in terms] for setting in self._settings]) * weight[:, None]
        lengths = np.linalg.norm(table, axis=0)
        if not lengths.all() or np.linalg.svd(table / lengths, compute_uv=False)[-1] < _ALIKE:
            return None
        inverse = np.linalg.pinv(table)
        values, several = inverse @ (times * weight), inverse @ (drawn * weight[:, None])

        def score(coefficients: np.ndarray, data: np.ndarray) -> np.ndarray:
            misfit = ((table @ coefficients - data) ** 2).sum(axis=0)
            return np.where((coefficients >= 0).all(axis=0), misfit + 2 * len(terms), np.inf)

        scores = score(several, drawn * weight[:, None])
        return _Model(terms, values, float(score(values, times * weight)), several, np.exp(-scores / 2))


def _combinations() -> list[tuple[str, ...]]:
    """Every combination of terms with at most one latency; some work or serial part there always is."""
    latencies = [name for name in TERMS if name.startswith("latency")]
    others = [name for name in TERMS if name not in latencies]
    return [(*some, *latency) for size in range(1, len(others) + 1) for some in itertools.combinations(others, size)
            for latency in ((), *((name,) for name in latencies)) if {"work", "serial"} & set(some)]


def _check(pairs: Sequence[tuple[Curve, Measured]]) -> None:
    sizes = sorted({curve.size(point) for curve, point in pairs})
    if len(sizes) < LEAST_SIZES:
        raise UserError(f"no fit: it needs {LEAST_SIZES} sizes, measured are {', '.join(map(str, sizes))}",
                        instead="more sizes (--nodes 1,2,4)")
    if not all(point.step_time.freedom for _, point in pairs):
        raise UserError("no fit: nothing is known of the error of some points",
                        instead="--repeats 3, or more steps")


def _counted(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Those that know how runs differ, where there are any: the steps of one run differ by less."""
    return [one for one in estimates if one.basis == "runs"] or list(estimates)


def _pooled(estimates: Sequence[Estimate], runs: Sequence[int]) -> np.ndarray:
    """Relative standard error of each point, with the noise of one run pooled over all that know it."""
    counted = _counted(estimates)
    variances = [one.variance * count for one, count in zip(estimates, runs, strict=True) if one in counted]
    of_one = float(np.average(variances, weights=[one.freedom for one in counted]))
    return np.maximum(np.sqrt(of_one / np.array(runs, float)), _FLOOR)


def _misfit(model: _Model, settings: Sequence[Setting], times: np.ndarray, errors: np.ndarray) -> float:
    fitted = np.array([model.coefficients @ model.at(setting) for setting in settings])
    return float((((fitted - times) / (times * errors)) ** 2).sum())


def _quantiles(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    tail = (1 - CONFIDENCE) / 2
    low, high = np.searchsorted(reached, (tail, 1 - tail))
    return float(values[order[low]]), float(values[order[min(high, len(values) - 1)]])


# Beyond what was measured, with a band, and not far.
REACH = 4
"""Times the largest measured size; beyond it nothing is said."""

Band = tuple[float, float]


@dataclass(frozen=True)
class Prediction:
    """A curve at another size by the fit. Bands are those of the mean over runs, at confidence.CONFIDENCE; a single
    run scatters around it. `efficiency` is against the smallest point as measured."""

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
        unit = self.curve.unit

        def said(size: int) -> str:
            return f"{size} or more" if size == self.limit else str(size)

        text = f"efficiency stays at {self.target:.0%} or above up to {said(self.size)} {unit}"
        if self.sure != self.possible:
            text += f" (between {said(self.sure)} and {said(self.possible)} by the band)"
        return text


def predict(fit: Fit, curve: Curve, size: int) -> Prediction:
    """The curve at `size` (nodes or ranks, as curve.unit says).

    Raises:
        UserError: the size is smaller than what was measured, more than REACH times the largest, or one at which
            the curve could not be measured.
    """
    smallest, largest = curve.size(curve.base), curve.size(curve.points[-1])
    if not smallest <= size <= REACH * largest:
        raise UserError(f"no prediction for {size} {curve.unit}: measured were {smallest} to {largest}",
                        where=curve.name, instead=f"{smallest} to {REACH * largest} {curve.unit} "
                        f"({REACH} times the largest), or measure a larger point")
    ranks = curve.base.ranks * size / smallest
    if ranks != int(ranks):
        raise UserError(f"{size} {curve.unit} are {ranks:g} ranks", where=curve.name,
                        instead=f"a multiple of {smallest}")
    check_divides(curve, size)
    setting = setting_at(curve, size, fit.shape)
    seconds = fit.seconds(setting)
    efficiency, efficiency_band = _efficiency(fit, curve, setting)
    return Prediction(curve, size, int(ranks), seconds, fit.band(setting), setting.tokens * ranks / seconds,
                      efficiency, efficiency_band, fit.parts(setting), size > largest)


def sizes_to_speak_of(curve: Curve) -> list[int]:
    """The sizes that `predict` answers for."""
    smallest, largest = curve.size(curve.base), curve.size(curve.points[-1])
    return [size for size in range(smallest, REACH * largest + 1) if _can_be(curve, size)]


def find_target(fit: Fit, curve: Curve, target: float) -> Target:
    """Find the size at which efficiency falls under `target`, among the sizes at which the curve could be measured.

    Raises:
        UserError: the target is no fraction between 0 and 1.
    """
    if not 0 < target <= 1:
        raise UserError(f"a target efficiency of {target:g}", where="--target", instead="a fraction such as 0.8")
    sizes = sizes_to_speak_of(curve)
    found = [_efficiency(fit, curve, setting_at(curve, size, fit.shape)) for size in sizes]

    def last(values: list[float]) -> int:
        # The first failure counts: a model may rise again where fewer micro-steps are left. At the smallest size
        # efficiency is 1 by definition, whatever the band of the fit there.
        under = next((i for i, value in enumerate(values[1:], 1) if value < target), len(values))
        return sizes[under - 1]

    middle, low, high = (list(values) for values in zip(*((one, *band) for one, band in found), strict=True))
    return Target(curve, target, last(middle), last(low), last(high), sizes[-1])


def line(fit: Fit, curve: Curve, points: int = 60) -> list[tuple[float, float, Band]]:
    """(size, efficiency, band) from the smallest size to the largest that may be spoken of, to be drawn."""
    smallest, largest = curve.size(curve.base), sizes_to_speak_of(curve)[-1]
    sizes = [smallest + (largest - smallest) * i / points for i in range(points + 1)]
    return [(size, *_efficiency(fit, curve, setting_at(curve, size, fit.shape))) for size in sizes]


def _efficiency(fit: Fit, curve: Curve, setting: Setting) -> tuple[float, Band]:
    base = curve.base
    work = setting.tokens / (base.first.step_tokens / base.ranks)
    low, high = fit.band(setting, over=base)
    return work * base.step_time.value / fit.seconds(setting), (work / high, work / low)


def _can_be(curve: Curve, size: int) -> bool:
    if curve.base.ranks * size % curve.size(curve.base):
        return False
    try:
        check_divides(curve, size)
    except UserError:
        return False
    return True
