"""Beyond what was measured, with a band, and not far (no torch)."""

from __future__ import annotations

from dataclasses import dataclass

from ezpz_llm.errors import UserError
from ezpz_llm.scaling.efficiency import Curve
from ezpz_llm.scaling.fit import Fit
from ezpz_llm.scaling.law import Setting, check_divides, setting_at

REACH = 4
"""Times the largest measured size; beyond it nothing is said."""

Band = tuple[float, float]


@dataclass(frozen=True)
class Prediction:
    """A curve at another size by the fit. Bands are those of the mean over runs, at interval.CONFIDENCE; a single
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
    """Where efficiency falls under `target`, among the sizes at which the curve could be measured.

    Raises:
        UserError: the target is no fraction between 0 and 1.
    """
    if not 0 < target <= 1:
        raise UserError(f"a target efficiency of {target:g}", where="--target", instead="a fraction such as 0.8")
    sizes = sizes_to_speak_of(curve)
    found = [_efficiency(fit, curve, setting_at(curve, size, fit.shape)) for size in sizes]

    def last(values: list[float]) -> int:
        # The first failure counts: a law may rise again where fewer micro-steps are left. At the smallest size
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
