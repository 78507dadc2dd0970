"""Step-time model of a study: fit, predictions with bands, and causes of superlinear speedup (no torch).

A few points do not determine which terms the model has. Each combination of TERMS is therefore fitted by least
squares, excluded if a coefficient is negative, and weighted by Akaike's criterion. The best model is reported, and
all of them contribute to the band. The effect of noise is estimated by refitting to studies drawn with the measured
errors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ezpz_llm.base import UserError
from ezpz_llm.base.shell_commands import to_typable
from ezpz_llm.rundir import RunDir, read_layout
from ezpz_llm.scaling.efficiency import CONFIDENCE, MAX_DISAGREEMENT, Curve, Estimate, Measured

TERMS = ("work", "serial", "divided", "bandwidth", "latency, tree", "latency, ring")
"""A model has at most one of the two latencies, and always a work or serial term."""

MIN_SIZES = 3
MAX_EXTRAPOLATION = 4
"""Largest size that can be predicted, as a multiple of the largest measured size."""

_DRAWS = 1000
_FLOOR = 1e-3
"""Lower bound for the relative error of a point: no model is more accurate."""
_MIN_SINGULAR_VALUE = 1e-6  # below it, the points cannot tell the terms apart

Band = tuple[float, float]


@dataclass(frozen=True)
class Shape:
    """Features of a layout in the step-time model.

    Attributes:
        pp: pipeline stages.
        per_micro_step: True if gradients are reduced once per micro-step.
        shards_state: True if the optimizer state is sharded over data-parallel ranks.
        within: ranks per shard group, if not all ranks: shards are gathered and scattered within a group, then
            all-reduced across groups.
    """

    pp: int = 1
    per_micro_step: bool = False
    shards_state: bool = False
    within: int | None = None


def shape_of(run_dir: Path) -> Shape | None:
    """Return the shape of a run's layout from its layout.json; None if there is no such file."""
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
    """Model inputs at a measured or hypothetical point.

    Attributes:
        size: nodes or ranks.
        dp: data-parallel ranks.
        tokens: tokens per step and rank.
        accumulation: micro-steps; fractional for plotted sizes between measured points.
        is_one_node: True if all traffic stays within one node, where its cost does not depend on the size.
    """

    size: float
    dp: float
    tokens: float
    accumulation: float
    is_one_node: bool
    shape: Shape

    @property
    def bubble(self) -> float:
        """Idle time of the pipeline divided by its work."""
        return (self.shape.pp - 1) / self.accumulation

    @property
    def terms(self) -> np.ndarray:
        """Value of each of TERMS, by which its coefficient is multiplied."""
        rounds = self.accumulation if self.shape.per_micro_step else 1.0
        group = min(self.shape.within or self.dp, self.dp)
        spread = max(1.0, group * self.size / self.dp)  # nodes (or ranks) per shard group
        return np.array([self.tokens * (1 + self.bubble), 1.0, self.shape.shards_state / group,
                         0.0 if self.is_one_node else rounds * self._moved(group, spread),
                         rounds * math.log2(self.size), rounds * (spread - 1 + self.size / spread - 1)])

    def _moved(self, group: float, spread: float) -> float:
        """Return the traffic per link between nodes (or ranks), relative to two all-gathers and a reduce-scatter.

        Traffic within a node does not depend on the size. An all-reduce across groups moves each shard twice.
        """
        copies = self.dp / group
        inside = (group - 1) / group if spread > 1 else 0.0
        return inside + 2 / (3 * group) * (copies - 1) / copies


def setting_of(curve: Curve, point: Measured, shape: Shape) -> Setting:
    """Return the model's inputs at a measured point."""
    repeat = point.first
    is_one_node = curve.unit == "nodes" and point.nodes == 1
    return Setting(curve.size(point), repeat.global_batch / (repeat.micro_batch * repeat.accumulation),
                   repeat.step_tokens / point.ranks, repeat.accumulation, is_one_node, shape)


def setting_at(curve: Curve, size: float, shape: Shape) -> Setting:
    """Return the model's inputs at another size, with the same batch per device (weak) or global batch (strong)."""
    base = setting_of(curve, curve.base, shape)
    growth = size / base.size
    divided = growth if curve.mode == "strong" else 1.0
    return replace(base, size=size, dp=base.dp * growth, tokens=base.tokens / divided,
                   accumulation=max(1.0, base.accumulation / divided),
                   is_one_node=curve.unit == "nodes" and size <= 1)


@dataclass(frozen=True)
class _Model:
    """Model with one combination of terms.

    Attributes:
        terms: indices into TERMS.
        coefficients: shape (TERMS, 1 + draws); column 0 fits the study itself, the others drawn studies.
        scores: shape (1 + draws); Akaike's criterion, infinite if a coefficient is negative.
    """

    terms: tuple[int, ...]
    coefficients: np.ndarray
    scores: np.ndarray

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the terms."""
        return tuple(TERMS[number] for number in self.terms)


@dataclass(frozen=True)
class Fitted:
    """Measured point and its step time under the best model, in seconds by term."""

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
        """Relative deviation of the model from the measurement."""
        return self.seconds / self.measured - 1


class Fit:
    """Step-time models fitted to all points of one layout, weak and strong together.

    Attributes:
        curves: the fitted curves.
        rows: each point and its step time under the best model.
        error: relative root mean square deviation of the best model from the points.
        noise: root mean square of the points' relative standard errors, from their runs or steps.
        free: number of points minus number of terms of the best model. With 0, nothing tests the form of the
            model, and `error` is not meaningful.
        terms: terms of the best model.
        rivals: other models that the points support about as well (within 2 of Akaike's criterion).
    """

    def __init__(self, curves: Sequence[Curve], shape: Shape, seed: int = 0) -> None:
        """Fit the models.

        Raises:
            UserError: there are fewer than MIN_SIZES sizes, or the error of a point is unknown.
        """
        self.curves, self.shape = tuple(curves), shape
        pairs = [(curve, point) for curve in curves for point in curve.points]
        _check_points(pairs)
        settings = [setting_of(curve, point, shape) for curve, point in pairs]
        table = np.array([setting.terms for setting in settings])
        times = np.array([point.step_time.value for _, point in pairs])
        errors, freedom = _pool_errors([point.step_time for _, point in pairs],
                                       [len(point.good) for _, point in pairs])
        rng = np.random.default_rng(seed)
        scale = np.sqrt(freedom / rng.chisquare(freedom, _DRAWS))
        normal = rng.standard_normal((len(pairs), _DRAWS)) * scale

        models = _fit_models(table, times, errors, normal)
        best = models[0]
        self.free = len(pairs) - len(best.terms)
        misfit = (((table @ best.coefficients[:, 0] - times) / (times * errors)) ** 2).sum()
        if misfit > self.free > 0:
            # Treat deviations that no model explains as noise, so that the band covers them.
            errors = errors * np.sqrt(misfit / self.free)
            models = _fit_models(table, times, errors, normal)
        self._best = models[0]
        self._drawn = np.stack([model.coefficients[:, 1:] for model in models])
        self._weights = np.exp([-model.scores[1:] / 2 for model in models])
        self._measured = {id(point): drawn
                          for (_, point), drawn in zip(pairs, _draw_times(times, errors, normal), strict=True)}
        self.terms = self._best.names
        self.rivals = tuple(model.names for model in models[1:] if model.scores[0] < self._best.scores[0] + 2)
        self.noise = float(np.sqrt(np.mean(errors**2)))
        self.rows = tuple(Fitted(curve, point, self.parts(setting), float(seconds))
                          for (curve, point), setting, seconds in zip(pairs, settings, times, strict=True))
        self.error = float(np.sqrt(np.mean([row.deviation**2 for row in self.rows])))

    def parts(self, setting: Setting) -> dict[str, float]:
        """Return seconds by term under the best model, with a pipeline's bubble separate from the work."""
        seconds = (self._best.coefficients[:, 0] * setting.terms).tolist()
        parts = {TERMS[number]: seconds[number] for number in self._best.terms}
        if setting.shape.pp > 1 and "work" in parts:
            parts["bubble"] = parts["work"] * setting.bubble / (1 + setting.bubble)
            parts["work"] -= parts["bubble"]
        return parts

    def seconds(self, setting: Setting) -> float:
        """Return the step time under the best model."""
        return float(setting.terms @ self._best.coefficients[:, 0])

    def band(self, setting: Setting, over: Measured | None = None) -> Band:
        """Return the band of the step time at CONFIDENCE, or of its ratio to the measured time of `over`."""
        values = setting.terms @ self._drawn
        if over is not None:
            values = values / self._measured[id(over)]
        order = np.argsort(values, axis=None)
        reached = np.cumsum(self._weights.ravel()[order]) / self._weights.sum()
        tail = (1 - CONFIDENCE) / 2
        low, high = order[np.minimum(np.searchsorted(reached, (tail, 1 - tail)), len(order) - 1)]
        return float(values.flat[low]), float(values.flat[high])


def _check_points(pairs: Sequence[tuple[Curve, Measured]]) -> None:
    sizes = sorted({curve.size(point) for curve, point in pairs})
    if len(sizes) < MIN_SIZES:
        raise UserError(f"no fit: it requires {MIN_SIZES} sizes, and the study has {', '.join(map(str, sizes))}",
                        instead="more sizes (--nodes 1,2,4)")
    if not all(point.step_time.freedom for _, point in pairs):
        raise UserError("no fit: the error of some points is unknown",
                        instead="--repeats 3, or more steps")


def _pool_errors(estimates: Sequence[Estimate], runs: Sequence[int]) -> tuple[np.ndarray, float]:
    """Return the relative standard error of each point and its degrees of freedom.

    The variance of a run is pooled over the points. Points with several runs take precedence over points with one
    run, whose steps vary less than runs do.
    """
    pairs = list(zip(estimates, runs, strict=True))
    pooled = [(estimate, count) for estimate, count in pairs if estimate.basis == "runs"] or pairs
    freedoms = [estimate.freedom for estimate, _ in pooled]
    run_variance = float(np.average([estimate.variance * count for estimate, count in pooled], weights=freedoms))
    return np.maximum(np.sqrt(run_variance / np.array(runs, float)), _FLOOR), sum(freedoms)


def _draw_times(times: np.ndarray, errors: np.ndarray, normal: np.ndarray) -> np.ndarray:
    """Draw step times (points, draws) of studies with the measured errors."""
    return times[:, None] * np.exp(errors[:, None] * normal)


def _fit_models(table: np.ndarray, times: np.ndarray, errors: np.ndarray, normal: np.ndarray) -> list[_Model]:
    """Fit every combination of terms that the points can tell apart by least squares, best first.

    Args:
        table: shape (points, TERMS).
        normal: shape (points, draws), noise of the drawn studies in units of `errors`.
    """
    weight = 1 / (times * errors)[:, None]
    data = np.column_stack([times, _draw_times(times, errors, normal)]) * weight
    models = []
    for terms in _combinations():
        part = table[:, list(terms)] * weight
        lengths = np.linalg.norm(part, axis=0)
        if (len(terms) > len(times) or not lengths.all()
                or np.linalg.svd(part / lengths, compute_uv=False)[-1] < _MIN_SINGULAR_VALUE):
            continue
        coefficients = np.zeros((len(TERMS), data.shape[1]))
        coefficients[list(terms)] = np.linalg.pinv(part) @ data
        misfit = ((part @ coefficients[list(terms)] - data) ** 2).sum(axis=0)
        scores = np.where((coefficients >= 0).all(axis=0), misfit + 2 * len(terms), np.inf)
        models.append(_Model(terms, coefficients, scores))
    return sorted(models, key=lambda model: (round(float(model.scores[0]), 6), len(model.terms)))


def _combinations() -> list[tuple[int, ...]]:
    """Return the indices of the terms of every model."""
    work, serial, divided, bandwidth, tree, ring = range(len(TERMS))
    choices = (work, serial, divided, bandwidth)
    return [(*chosen, *latency) for size in range(1, 5) for chosen in itertools.combinations(choices, size)
            if {work, serial} & set(chosen) for latency in ((), (tree,), (ring,))]


@dataclass(frozen=True)
class Prediction:
    """Prediction of a curve at another size.

    Bands at CONFIDENCE are for the mean over runs; single runs scatter around it. `efficiency` is relative to the
    measured smallest point.
    """

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
    """Largest size at which a curve's efficiency is at least `target`.

    Attributes:
        size: estimate by the fit.
        sure: estimate by the lower edge of the band.
        possible: estimate by the upper edge of the band.
        limit: largest size that can be predicted. An estimate equal to it is a lower bound.
    """

    curve: Curve
    target: float
    size: int
    sure: int
    possible: int
    limit: int

    def describe(self) -> str:
        """Return the target as a sentence."""
        size, sure, possible = (f"{size} or more" if size == self.limit else str(size)
                                for size in (self.size, self.sure, self.possible))
        text = f"efficiency is at least {self.target:.0%} up to {size} {self.curve.unit}"
        return text + (f" (band: {sure} to {possible})" if sure != possible else "")


def predict(fit: Fit, curve: Curve, size: int) -> Prediction:
    """Predict the curve at `size`, in curve.unit.

    Raises:
        UserError: the size is below the measured sizes, more than MAX_EXTRAPOLATION times the largest, or not
            possible for the curve.
    """
    if error := _size_error(curve, size):
        raise error
    ranks = curve.base.ranks * size // curve.size(curve.base)
    setting = setting_at(curve, size, fit.shape)
    seconds = fit.seconds(setting)
    return Prediction(curve, size, ranks, seconds, fit.band(setting), setting.tokens * ranks / seconds,
                      *_efficiency(fit, curve, setting), fit.parts(setting), size > curve.size(curve.points[-1]))


def _size_error(curve: Curve, size: int) -> UserError | None:
    """Return the error for a size out of range or at which the curve cannot run; None if it can be predicted."""
    base, largest = curve.base, curve.size(curve.points[-1])
    smallest = curve.size(base)
    if not smallest <= size <= MAX_EXTRAPOLATION * largest:
        return UserError(f"no prediction for {size} {curve.unit}: the study measured {smallest} to {largest}",
                         where=curve.name, instead=f"{smallest} to {MAX_EXTRAPOLATION * largest} {curve.unit} "
                         f"({MAX_EXTRAPOLATION} times the largest), or measure a larger point")
    if base.ranks * size % smallest:
        return UserError(f"{size} {curve.unit} are {base.ranks * size / smallest:g} ranks", where=curve.name,
                         instead=f"a multiple of {smallest}")
    repeat = base.first
    micro_batches = {point.first.micro_batch for point in curve.points}
    # If micro-batches differ between points, the trainer chose them and may choose 1 elsewhere.
    micro_batch = micro_batches.pop() if len(micro_batches) == 1 else 1
    dp = repeat.global_batch / (repeat.micro_batch * repeat.accumulation) * size / smallest
    if curve.mode == "strong" and (dp != int(dp) or repeat.global_batch % (micro_batch * int(dp))):
        return UserError(f"a global batch of {repeat.global_batch} in micro-batches of {micro_batch} cannot be "
                         f"divided over {dp:g} data-parallel ranks", where=f"{curve.name} at {size} {curve.unit}",
                         instead="a size that divides the batch, or a study with another --global-batch-size")
    return None


def extrapolation_sizes(curve: Curve) -> list[int]:
    """Return the sizes that `predict` supports."""
    largest = MAX_EXTRAPOLATION * curve.size(curve.points[-1])
    return [size for size in range(1, largest + 1) if _size_error(curve, size) is None]


def find_target(fit: Fit, curve: Curve, target: float) -> Target:
    """Return the size up to which efficiency is at least `target`, among the sizes that can be predicted.

    Raises:
        UserError: the target is not above 0 and at most 1.
    """
    if not 0 < target <= 1:
        raise UserError(f"invalid target efficiency of {target:g}", where="--target",
                        instead="a fraction such as 0.8")
    sizes = extrapolation_sizes(curve)
    efficiencies = [_efficiency(fit, curve, setting_at(curve, size, fit.shape)) for size in sizes]

    def last(values: Sequence[float]) -> int:
        # Stop at the first size below the target: efficiency may rise again as micro-steps run out. Skip the
        # smallest size, where efficiency is 1 by definition although the band may be below.
        below = next((i for i, value in enumerate(values[1:], 1) if value < target), len(values))
        return sizes[below - 1]

    middle, low, high = zip(*((efficiency, *band) for efficiency, band in efficiencies), strict=True)
    return Target(curve, target, last(middle), last(low), last(high), sizes[-1])


def fit_line(fit: Fit, curve: Curve, points: int = 60) -> list[tuple[float, float, Band]]:
    """Return (size, efficiency, band) from the smallest to the largest predictable size, for a plot."""
    sizes = np.linspace(curve.size(curve.base), extrapolation_sizes(curve)[-1], points + 1).tolist()
    return [(size, *_efficiency(fit, curve, setting_at(curve, size, fit.shape))) for size in sizes]


def _efficiency(fit: Fit, curve: Curve, setting: Setting) -> tuple[float, Band]:
    base = curve.base
    work = setting.tokens / (base.first.step_tokens / base.ranks)
    low, high = fit.band(setting, over=base)
    return work * base.step_time.value / fit.seconds(setting), (work / high, work / low)


_MEMORY_RATIO = 0.9
"""Memory peak relative to the smallest point's, below which memory is reported as a cause."""
_SPREAD = 1.2
"""90th percentile of the step time over the median above which a point is reported as unsteady."""


def explain_superlinear(curve: Curve, point: Measured) -> tuple[str, ...]:
    """Return the possible causes of an efficiency above 100 %, likeliest first.

    More devices do not make each of them faster, so such an efficiency always gets a cause or "not explained".
    The result is empty only if efficiency is at most 100 %.
    """
    efficiency = curve.efficiency(point)
    if point is curve.base or efficiency.value <= 1:
        return ()
    interval = efficiency.interval
    if interval is not None and interval[0] <= 1:
        runs = f", and runs of the smallest point differ by a factor of {curve.base.disagreement:.1f}"
        return (f"within the noise: its interval begins at {interval[0]:.1%}"
                + runs * (curve.base.disagreement > MAX_DISAGREEMENT),)
    causes = [*_batch_causes(curve.base, point), *_breakdown_causes(curve.base, point),
              *_memory_causes(curve.base, point), *_unsteady_causes(curve.base)]
    if interval is None:
        causes.append("its error is unknown (a single short run): measure with --repeats 3")
    if not causes:
        causes.append(f"not explained: the baseline {curve.base.name} is too slow for a reason that was not "
                      "measured; do not use this number before you have checked its runs "
                      f"({to_typable(f'ezpz-llm explain {curve.base.first.run_dir}')})")
    return tuple(causes)


def explain_predicted(fit: Fit, prediction: Prediction) -> str | None:
    """Return the cause of a superlinear prediction; None if it is not above 100 %."""
    if prediction.efficiency <= 1:
        return None
    if prediction.efficiency_band[0] <= 1:
        return f"within the noise: its band begins at {prediction.efficiency_band[0]:.1%}"
    curve = prediction.curve
    base_parts, base = fit.parts(setting_of(curve, curve.base, fit.shape)), curve.base
    work = base.tokens_per_second_per_device * base.step_time.value * prediction.ranks / (
        prediction.tokens_per_second * prediction.seconds)
    gains = {part: seconds - prediction.parts.get(part, 0.0) * work for part, seconds in base_parts.items()}
    part, gain = max(gains.items(), key=lambda item: item[1])
    if gain * 2 < base.step_time.value - prediction.seconds * work:
        return f"not explained: the baseline {base.name} is slower than the fit; do not use this number"
    return (f"the term {part} of the fit takes {gain * 1e3:.1f} ms per step less for the same tokens"
            + (": the optimizer state is sharded over more ranks" if part == "divided" else ""))


def _batch_causes(base: Measured, point: Measured) -> list[str]:
    """Return differences in batch and placement that reduce the work per token."""
    before, after = base.first, point.first
    causes = []
    if after.accumulation < before.accumulation:
        causes.append(f"fewer micro-steps per step ({after.accumulation}, at the smallest point "
                      f"{before.accumulation}): less overhead per token")
    if after.micro_batch > before.micro_batch:
        causes.append(f"a larger micro-batch ({after.micro_batch}, at the smallest point {before.micro_batch}) "
                      "utilizes a device better")
    if after.ranks / after.nodes < before.ranks / before.nodes:
        causes.append(f"fewer ranks per node ({after.ranks / after.nodes:g}, at the smallest point "
                      f"{before.ranks / before.nodes:g}) share its memory and cores")
    return causes


def _breakdown_causes(base: Measured, point: Measured) -> list[str]:
    """Return the parts of the traced step that account for at least a tenth of the gain."""
    before, after = base.split, point.split
    if before is None or after is None:
        return []
    work = base.first.step_tokens / base.ranks * point.ranks / point.first.step_tokens
    gains = {part: before[part] - after[part] * work for part in before}
    gain = base.step_time.value - point.step_time.value * work
    causes = {"optimizer": "its state is sharded over more ranks", "data": "each rank reads less",
              "compute": "smaller tensors fit into the caches, or the smallest point ran on slower or hotter cores"}
    return [f"{part} takes {seconds * 1e3:.1f} ms per step less for the same tokens"
            + (f" ({causes[part]})" if part in causes else "")
            for part, seconds in sorted(gains.items(), key=lambda item: -item[1]) if seconds > max(gain, 0) / 10]


def _memory_causes(base: Measured, point: Measured) -> list[str]:
    causes = []
    for kind, name in (("device", "device"), ("host", "CPU")):
        before, after = (getattr(measured, f"peak_{kind}_bytes") for measured in (base, point))
        if before and after and after < _MEMORY_RATIO * before:
            causes.append(f"a rank uses {after / 2**30:.2f} GiB of {name} memory, at the smallest point "
                          f"{before / 2**30:.2f}: the smallest point may have been short of memory or cache")
    return causes


def _unsteady_causes(base: Measured) -> list[str]:
    steps = base.steps
    if steps.high > _SPREAD * steps.median:
        return [f"the smallest point was not steady: 10 % of its steps took longer than {steps.high * 1e3:.1f} "
                f"ms, and the median is {steps.median * 1e3:.1f} ms"]
    return []
