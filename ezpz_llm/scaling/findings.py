"""Findings of a study from its finished runs (no torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ezpz_llm.base import UserError, grouped
from ezpz_llm.scaling.efficiency import Curve, Measured, curves_of, points_of
from ezpz_llm.scaling.fit import (
    REACH,
    Fit,
    Prediction,
    Shape,
    Target,
    find_target,
    predict,
    shape_of,
    sizes_to_speak_of,
)
from ezpz_llm.scaling.options import is_own_script
from ezpz_llm.scaling.study import Provenance, provenance_of, read_repeats, read_study

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
    own = is_own_script(study.points[0].command)
    why = "the layout of {} is not known" if own else "the run directories of {} are gone"
    gone = [f"{why.format(name)}: it is fitted as ddp would be" for name in good if name not in shapes]
    runs = grouped((one.point, folder / one.run_dir) for one in repeats if one.error is None)
    points = points_of(repeats)
    curves = [curve for curve in curves_of(points) if len(curve.points) > 1]
    baselines = [f"{point.name} has no good run: efficiencies are against {curve.base.name}"
                 for curve in curves for point in points if point.ranks < curve.base.ranks
                 and (point.mode, point.ds_config) == (curve.mode, curve.ds_config)]
    extrapolations = [_extrapolate(name, own, shapes.get(name, Shape()), target, at)
                      for name, own in grouped((curve.ds_config, curve) for curve in curves).items()]
    return Findings(folder.name, tuple(points), tuple(curves), tuple(_contests(points)), tuple(extrapolations),
                    study.typed, (*study.notes, *gone, *baselines),
                    len(study.points) * study.repeats - len(repeats),
                    {name: provenance_of(run_dirs) for name, run_dirs in runs.items()})


def _contests(points: Sequence[Measured]) -> list[tuple[Measured, ...]]:
    """Layouts at the largest size that several have, one a mode, the fastest first."""
    groups = grouped(((point.ranks, point.nodes, point.mode), point) for point in points if point.good)
    found = {mode: group for (*_, mode), group in sorted(groups.items(), key=lambda item: item[0][:2])
             if len(group) > 1}
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
        # Twice the largest size, and as far as may be spoken of, where the curve could be measured there.
        largest, possible = curve.size(curve.points[-1]), sizes_to_speak_of(curve)
        for size in at or [size for size in (2 * largest, REACH * largest) if size in possible]:
            try:
                predictions.append(predict(fit, curve, size))
            except UserError as error:
                refused.append(error)
    if refused and not predictions:
        raise refused[0]
    targets = [find_target(fit, curve, target) for curve in curves]
    return Extrapolation(name, fit, "", tuple(predictions), tuple(targets),
                         tuple(f"{error.where}: {error.found}" for error in refused))
