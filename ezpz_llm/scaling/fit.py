"""A fit of step time over size: every law that the points can tell apart, weighed (no torch).

A few points cannot say which terms there are. So each combination of terms (law.py) is fitted, with coefficients
that are not negative, and weighed by Akaike's criterion; the best one is shown, and all of them make the band. What
noise does to them is seen by fitting them again to studies drawn with the measured errors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ezpz_llm.errors import UserError
from ezpz_llm.scaling.efficiency import Curve, Measured
from ezpz_llm.scaling.interval import CONFIDENCE, Estimate
from ezpz_llm.scaling.law import TERMS, Setting, Shape, setting_of

LEAST_SIZES = 3
_DRAWS = 1000
_FLOOR = 1e-3
"""The least relative error of a point: no law is truer than this."""
_ALIKE = 1e-6  # of singular values: terms that cannot be told apart at these points


@dataclass(frozen=True)
class _Law:
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
    """A measured point against the best law: seconds measured, and by term."""

    curve: Curve
    point: Measured
    parts: dict[str, float]
    measured: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def deviation(self) -> float:
        """Of the law from the measurement, as a fraction of it."""
        return self.seconds / self.measured - 1


class Fit:
    """The laws fitted to all points of one layout, weak and strong together.

    Attributes:
        curves: what was fitted.
        rows: each point against the best law.
        error: root mean square deviation of the best law from the points, as a fraction.
        noise: mean relative standard error of a point, from its runs or steps.
        free: points less terms of the best law; with 0 nothing tests the form, and `error` says nothing.
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

        laws = self._fit_all(times, errors, normal)
        best = laws[0]
        self.free = len(pairs) - len(best.terms)
        if self.free > 0 and (misfit := _misfit(best, self._settings, times, errors) / self.free) > 1:
            # What no law explains is taken for noise: the band has to hold it.
            errors = errors * np.sqrt(misfit)
            laws = self._fit_all(times, errors, normal)
        self._laws = laws
        self._measured = {id(point): seconds * np.exp(errors[i] * normal[i])
                          for i, ((_, point), seconds) in enumerate(zip(pairs, times, strict=True))}
        self.noise = float(np.sqrt(np.mean(errors**2)))
        self.rows = tuple(Fitted(curve, point, self.parts(setting), float(seconds))
                          for (curve, point), setting, seconds in zip(pairs, self._settings, times, strict=True))
        self.error = float(np.sqrt(np.mean([row.deviation**2 for row in self.rows])))

    @property
    def terms(self) -> tuple[str, ...]:
        """Those of the best law."""
        return self._laws[0].terms

    @property
    def rivals(self) -> tuple[tuple[str, ...], ...]:
        """Other laws that the points support about as well (within 2 of Akaike's criterion)."""
        return tuple(law.terms for law in self._laws[1:] if law.score < self._laws[0].score + 2)

    def parts(self, setting: Setting) -> dict[str, float]:
        """Seconds by term under the best law, a pipeline's bubble apart from the work."""
        law = self._laws[0]
        parts = dict(zip(law.terms, map(float, law.coefficients * law.at(setting)), strict=True))
        if setting.shape.pp > 1 and "work" in parts:
            parts["bubble"] = parts["work"] * setting.bubble / (1 + setting.bubble)
            parts["work"] -= parts["bubble"]
        return parts

    def seconds(self, setting: Setting) -> float:
        """Step time under the best law."""
        law = self._laws[0]
        return float(law.coefficients @ law.at(setting))

    def band(self, setting: Setting, over: Measured | None = None) -> tuple[float, float]:
        """The band of the step time at CONFIDENCE; of its ratio to the time measured at `over`, if given."""
        values = [law.at(setting) @ law.drawn for law in self._laws]
        if over is not None:
            values = [one / self._measured[id(over)] for one in values]
        return _quantiles(np.concatenate(values), np.concatenate([law.weights for law in self._laws]))

    def _fit_all(self, times: np.ndarray, errors: np.ndarray, normal: np.ndarray) -> list[_Law]:
        """All laws that can be fitted, the best first."""
        drawn = times[:, None] * np.exp(errors[:, None] * normal)
        fitted = [law for terms in _combinations() if (law := self._fit(terms, times, errors, drawn)) is not None]
        return sorted(fitted, key=lambda law: (not np.isfinite(law.score), round(law.score, 6), len(law.terms)))

    def _fit(self, terms: tuple[str, ...], times: np.ndarray, errors: np.ndarray, drawn: np.ndarray) -> _Law | None:
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
        return _Law(terms, values, float(score(values, times * weight)), several, np.exp(-scores / 2))


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


def _misfit(law: _Law, settings: Sequence[Setting], times: np.ndarray, errors: np.ndarray) -> float:
    fitted = np.array([law.coefficients @ law.at(setting) for setting in settings])
    return float((((fitted - times) / (times * errors)) ** 2).sum())


def _quantiles(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    tail = (1 - CONFIDENCE) / 2
    low, high = np.searchsorted(reached, (tail, 1 - tail))
    return float(values[order[low]]), float(values[order[min(high, len(values) - 1)]])
