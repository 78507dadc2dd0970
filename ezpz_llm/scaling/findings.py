"""Findings of a study from its finished runs, superlinear speed-up explained (no torch)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ezpz_llm.base.errors import UserError
from ezpz_llm.scaling.efficiency import DISAGREEING, Curve, Measured, curves_of, points_of
from ezpz_llm.scaling.fit import (
    REACH,
    Fit,
    Prediction,
    Shape,
    Target,
    find_target,
    predict,
    setting_of,
    shape_of,
    sizes_to_speak_of,
)
from ezpz_llm.scaling.sample import Provenance, Repeat, provenance_of, read_repeats
from ezpz_llm.scaling.study import read_study

DEFAULT_TARGET = 0.8


@dataclass(frozen=True)
class Extrapolation:
    """The fit of one layout and what it says of each of its curves; or why there is none. `refused` says of which
    sizes that were asked for it says nothing on one curve or another."""

    ds_config: str
    fit: Fit | None
    why: str = ""
    predictions: tuple[Prediction, ...] = ()
    targets: tuple[Target, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Findings:
    """A study's points, curves (of more than one point), comparisons of layouts at one size, and extrapolations.
    `missing` says how many runs that were asked for have not finished."""

    name: str
    points: tuple[Measured, ...]
    curves: tuple[Curve, ...]
    contests: tuple[tuple[Measured, ...], ...]
    extrapolations: tuple[Extrapolation, ...]
    typed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    missing: int = 0
    provenance: Mapping[str, Provenance] = field(default_factory=dict)


def find(folder: Path, target: float = DEFAULT_TARGET, at: Sequence[int] = ()) -> Findings:
    """The findings of the study in `folder`; `at` are sizes to predict besides those chosen here.

    Raises:
        UserError: it is no study, no run has finished well, or a size or target that nothing can be said of.
    """
    study, repeats = read_study(folder), read_repeats(folder)
    if not any(one.error is None for one in repeats):
        why = next((f": {one.error}" for one in repeats if one.error), "")
        raise UserError(f"no run of the study has finished well{why}", where=str(folder),
                        instead=f"ezpz-llm scale --study {folder} continues it")
    good = {one.ds_config: folder / one.run_dir for one in reversed(repeats) if one.error is None}
    shapes = {name: shape for name, run_dir in good.items() if (shape := shape_of(run_dir)) is not None}
    gone = [f"the run directories of {name} are gone: it is fitted as ddp would be" for name in good
            if name not in shapes]
    runs = {one.point: [folder / other.run_dir for other in repeats
                        if other.point == one.point and other.error is None]
            for one in repeats if one.error is None}
    provenance = {name: provenance_of(run_dirs) for name, run_dirs in runs.items()}
    return put_together(folder.name, repeats, shapes, target, at, typed=study.typed, notes=(*study.notes, *gone),
                        missing=len(study.points) * study.repeats - len(repeats), provenance=provenance)


def put_together(name: str, repeats: Iterable[Repeat], shapes: Mapping[str, Shape], target: float = DEFAULT_TARGET,
                 at: Sequence[int] = (), *, typed: Sequence[str] = (), notes: Sequence[str] = (), missing: int = 0,
                 provenance: Mapping[str, Provenance] | None = None) -> Findings:
    """The findings of finished runs; `shapes` by layout, that of DDP where one is missing.

    Raises:
        UserError: a size or target that nothing can be said of.
    """
    points = points_of(repeats)
    curves = [curve for curve in curves_of(points) if len(curve.points) > 1]
    notes = (*notes, *(note for curve in curves for note in _smaller_that_failed(curve, points)))
    layouts = list(dict.fromkeys(curve.ds_config for curve in curves))
    extrapolations = [_extrapolate(name, [one for one in curves if one.ds_config == name],
                                   shapes.get(name, Shape()), target, at) for name in layouts]
    return Findings(name, tuple(points), tuple(curves), tuple(_contests(points)), tuple(extrapolations),
                    tuple(typed), tuple(notes), missing, provenance or {})


def _smaller_that_failed(curve: Curve, points: Sequence[Measured]) -> list[str]:
    return [f"{point.name} has no good run: efficiencies are against {curve.base.name}" for point in points
            if (point.mode, point.ds_config) == (curve.mode, curve.ds_config) and point.ranks < curve.base.ranks]


def _contests(points: Sequence[Measured]) -> list[tuple[Measured, ...]]:
    """Layouts at the largest size that several have, one a mode, the fastest first."""
    groups: dict[tuple[str, int, int], list[Measured]] = {}
    for point in points:
        if point.good:
            groups.setdefault((point.mode, point.ranks, point.nodes), []).append(point)
    found: dict[str, list[Measured]] = {}
    for (mode, *_), group in sorted(groups.items(), key=lambda item: item[0][1:]):
        if len(group) > 1:
            found[mode] = group
    return [tuple(sorted(group, key=lambda point: -point.tokens_per_second)) for group in found.values()]


def _extrapolate(name: str, curves: Sequence[Curve], shape: Shape, target: float,
                 at: Sequence[int]) -> Extrapolation:
    try:
        fit = Fit(curves, shape)
    except UserError as error:
        if at:
            raise
        return Extrapolation(name, None, f"{error.found}; {error.instead}")
    predictions, refused = [], []
    for curve in curves:
        for size in at or _chosen(curve):
            try:
                predictions.append(predict(fit, curve, size))
            except UserError as error:
                refused.append(error)
    if refused and not predictions:
        raise refused[0]
    targets = [find_target(fit, curve, target) for curve in curves]
    return Extrapolation(name, fit, "", tuple(predictions), tuple(targets),
                         tuple(f"{error.where}: {error.found}" for error in refused))


def _chosen(curve: Curve) -> list[int]:
    """Twice the largest size, and as far as may be spoken of, where the curve could be measured there."""
    largest = curve.size(curve.points[-1])
    possible = sizes_to_speak_of(curve)
    return [size for size in (2 * largest, REACH * largest) if size in possible]


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
                     f"(ezpz-llm explain {curve.base.first.run_dir})")
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
