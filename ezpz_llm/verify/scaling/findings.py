"""Results of a study, computed from its finished runs (no torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ezpz_llm.core.base import UserError, group_by_key
from ezpz_llm.verify.scaling.efficiency import Curve, Measured, curves_of, points_of
from ezpz_llm.verify.scaling.fit import MAX_EXTRAPOLATION, Extrapolation, Fit, extrapolate, fit_curve
from ezpz_llm.verify.scaling.study import Provenance, provenance_of, read_repeats, read_study


@dataclass(frozen=True)
class Findings:
    """Results of a study.

    Attributes:
        curves: curves with more than one point.
        contests: layouts compared at one size, fastest first.
        fits: fits of the curves with enough sizes.
        not_extrapolated: curves without a fit, and sizes that a curve cannot have, with the reasons.
        missing: number of planned runs that have not finished.
    """

    name: str
    points: tuple[Measured, ...]
    curves: tuple[Curve, ...]
    contests: tuple[tuple[Measured, ...], ...]
    fits: tuple[Fit, ...] = ()
    extrapolations: tuple[Extrapolation, ...] = ()
    not_extrapolated: tuple[str, ...] = ()
    typed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    missing: int = 0
    provenance: Mapping[str, Provenance] = field(default_factory=dict)


def find(folder: Path, at: Sequence[int] = ()) -> Findings:
    """Return the results of the study in `folder`.

    Args:
        at: sizes of the extrapolation (default: twice and four times the largest of each curve).

    Raises:
        UserError: the folder is not a study, no run succeeded, or no curve can be extrapolated to a size in `at`.
    """
    study, repeats = read_study(folder), read_repeats(folder)
    if not any(repeat.error is None for repeat in repeats):
        reason = next((f": {repeat.error}" for repeat in repeats if repeat.error), "")
        raise UserError(f"no run of the study succeeded{reason}", where=str(folder),
                        instead=f"ezpz-llm scale --study {folder} to continue it")
    runs = group_by_key((repeat.point, folder / repeat.run_dir) for repeat in repeats if repeat.error is None)
    points = points_of(repeats)
    curves = [curve for curve in curves_of(points) if len(curve.points) > 1]
    baseline_notes = [f"{point.name} has no good run: efficiencies are relative to {curve.base.name}"
                      for curve in curves for point in points if point.ranks < curve.base.ranks
                      and (point.mode, point.ds_config) == (curve.mode, curve.ds_config)]
    fits, extrapolations, errors = _extrapolate(curves, at)
    if at and not extrapolations and errors:
        raise errors[0]
    places = group_by_key((error.found, str(error.where)) for error in errors)
    reasons = tuple(f"{', '.join(names)}: {found}" for found, names in places.items())
    return Findings(folder.name, tuple(points), tuple(curves), tuple(_contests(points)), tuple(fits),
                    tuple(extrapolations), reasons, study.typed, (*study.notes, *baseline_notes),
                    len(study.points) * study.repeats - len(repeats),
                    {name: provenance_of(run_dirs) for name, run_dirs in runs.items()})


def _contests(points: Sequence[Measured]) -> list[tuple[Measured, ...]]:
    """Return for each mode the layouts at the largest size that several of them have, fastest first."""
    groups = group_by_key(((point.ranks, point.nodes, point.mode), point) for point in points if point.good)
    largest = {mode: group for (*_, mode), group in sorted(groups.items(), key=lambda item: item[0][:2])
               if len(group) > 1}
    return [tuple(sorted(group, key=lambda point: -point.tokens_per_second)) for group in largest.values()]


def _extrapolate(curves: Sequence[Curve],
                 at: Sequence[int]) -> tuple[list[Fit], list[Extrapolation], list[UserError]]:
    fits, extrapolations, errors = [], [], []
    for curve in curves:
        try:
            fit = fit_curve(curve)
        except UserError as error:
            errors.append(error)
            continue
        fits.append(fit)
        largest = curve.size(curve.points[-1])
        for size in at or (2 * largest, MAX_EXTRAPOLATION * largest):
            try:
                extrapolations.append(extrapolate(fit, size))
            except UserError as error:
                errors.append(error)
    return fits, extrapolations, errors
