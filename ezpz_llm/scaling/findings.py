"""Results of a study, computed from its finished runs (no torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ezpz_llm.base import UserError, group_by_key
from ezpz_llm.scaling.efficiency import Curve, Measured, curves_of, points_of
from ezpz_llm.scaling.fit import (
    MAX_EXTRAPOLATION,
    Fit,
    Prediction,
    Shape,
    Target,
    extrapolation_sizes,
    find_target,
    predict,
    shape_of,
)
from ezpz_llm.scaling.options import is_own_script
from ezpz_llm.scaling.study import Provenance, provenance_of, read_repeats, read_study

DEFAULT_TARGET = 0.8


@dataclass(frozen=True)
class Extrapolation:
    """Fit of one layout, with predictions for each of its curves.

    Attributes:
        fit: None if the points do not allow a fit; `reason` is why.
        rejected: requested sizes that cannot be predicted on some curve, with the reasons.
    """

    ds_config: str
    fit: Fit | None
    reason: str = ""
    predictions: tuple[Prediction, ...] = ()
    targets: tuple[Target, ...] = ()
    rejected: tuple[str, ...] = ()


@dataclass(frozen=True)
class Findings:
    """Results of a study.

    Attributes:
        curves: curves with more than one point.
        contests: layouts compared at one size, fastest first.
        missing: number of planned runs that have not finished.
    """

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
    """Return the results of the study in `folder`.

    Args:
        at: sizes to predict instead of the default ones.

    Raises:
        UserError: the folder is not a study, no run succeeded, or a size or target is out of range.
    """
    study, repeats = read_study(folder), read_repeats(folder)
    if not any(repeat.error is None for repeat in repeats):
        reason = next((f": {repeat.error}" for repeat in repeats if repeat.error), "")
        raise UserError(f"no run of the study succeeded{reason}", where=str(folder),
                        instead=f"ezpz-llm scale --study {folder} to continue it")
    good = {repeat.ds_config: folder / repeat.run_dir for repeat in reversed(repeats) if repeat.error is None}
    shapes = {name: shape for name, run_dir in good.items() if (shape := shape_of(run_dir)) is not None}
    is_script = is_own_script(study.points[0].command)
    reason = "the layout of {} is unknown" if is_script else "the run directories of {} are missing"
    shape_notes = [f"{reason.format(name)}: fitting it like ddp" for name in good if name not in shapes]
    runs = group_by_key((repeat.point, folder / repeat.run_dir) for repeat in repeats if repeat.error is None)
    points = points_of(repeats)
    curves = [curve for curve in curves_of(points) if len(curve.points) > 1]
    baseline_notes = [f"{point.name} has no good run: efficiencies are relative to {curve.base.name}"
                      for curve in curves for point in points if point.ranks < curve.base.ranks
                      and (point.mode, point.ds_config) == (curve.mode, curve.ds_config)]
    extrapolations = [_extrapolate(name, group, shapes.get(name, Shape()), target, at)
                      for name, group in group_by_key((curve.ds_config, curve) for curve in curves).items()]
    return Findings(folder.name, tuple(points), tuple(curves), tuple(_contests(points)), tuple(extrapolations),
                    study.typed, (*study.notes, *shape_notes, *baseline_notes),
                    len(study.points) * study.repeats - len(repeats),
                    {name: provenance_of(run_dirs) for name, run_dirs in runs.items()})


def _contests(points: Sequence[Measured]) -> list[tuple[Measured, ...]]:
    """Return for each mode the layouts at the largest size that several of them have, fastest first."""
    groups = group_by_key(((point.ranks, point.nodes, point.mode), point) for point in points if point.good)
    largest = {mode: group for (*_, mode), group in sorted(groups.items(), key=lambda item: item[0][:2])
               if len(group) > 1}
    return [tuple(sorted(group, key=lambda point: -point.tokens_per_second)) for group in largest.values()]


def _extrapolate(name: str, curves: Sequence[Curve], shape: Shape, target: float,
                 at: Sequence[int]) -> Extrapolation:
    try:
        fit = Fit(curves, shape)
    except UserError as error:
        if at:
            raise
        return Extrapolation(name, None, f"{error.found}; {error.instead}")
    predictions, rejections = [], []
    for curve in curves:
        # By default, twice the largest size and the limit of extrapolation, if the curve has points there.
        largest, possible = curve.size(curve.points[-1]), extrapolation_sizes(curve)
        for size in at or [size for size in (2 * largest, MAX_EXTRAPOLATION * largest) if size in possible]:
            try:
                predictions.append(predict(fit, curve, size))
            except UserError as error:
                rejections.append(error)
    if rejections and not predictions:
        raise rejections[0]
    targets = [find_target(fit, curve, target) for curve in curves]
    return Extrapolation(name, fit, "", tuple(predictions), tuple(targets),
                         tuple(f"{error.where}: {error.found}" for error in rejections))
