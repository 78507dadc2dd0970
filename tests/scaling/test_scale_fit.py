"""Fits of synthetic studies with a known step-time law, and their extrapolation to larger sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scale_laws import repeat, study

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.verify.scaling.efficiency import Curve, curves_of, points_of
from ezpz_llm.verify.scaling.fit import Fit, extrapolate, fit_curve

QUIET = {"runs": 1e-5, "within": 1e-5}


def ddp(mode: str, n: int, q: float, a: float) -> float:
    """Return seconds per step: 25 ms per sequence, a 60 ms ring, 4 ms per doubling."""
    return 0.025 * q + 0.06 * (n - 1) / n + 0.004 * math.log2(n)


def curve_of(seconds: Sequence[float], sizes: Sequence[int] = (1, 2, 4, 8), mode: str = "weak") -> Curve:
    """Return a curve with these step times, without noise."""
    curve, = curves_of(points_of([repeat(mode, n, steps=[step_s] * 20)
                                  for n, step_s in zip(sizes, seconds, strict=True)]))
    return curve


def coefficients(fit: Fit) -> tuple[float, float, float]:
    return fit.single, fit.limit, fit.doubling


@pytest.mark.parametrize("sizes", [(1, 2, 4), (1, 2, 4, 8)])
def test_fit_recovers_law_without_noise(sizes: tuple[int, ...]) -> None:
    repeats = study(ddp, np.random.default_rng(0), modes=("weak", "strong"), sizes=sizes, **QUIET)
    curves = curves_of(points_of(repeats))
    for curve, expected in zip(curves, ((0.1, 0.16, 0.004), (1.6, 0.06, 0.004)), strict=True):
        fit = fit_curve(curve)
        assert coefficients(fit) == pytest.approx(expected, rel=0.02)
        assert fit.residual < 1e-4
        assert fit.is_exact == (sizes == (1, 2, 4))
        for point in curve.points:
            assert fit.seconds(curve.size(point)) == pytest.approx(point.step_time.value, rel=1e-4)
        size = 4 * sizes[-1]
        batch = 4 if curve.mode == "weak" else 64 / size
        at = extrapolate(fit, size)
        assert at.seconds == pytest.approx(ddp("", size, batch, 1), rel=2e-3)
        assert at.tokens_per_second == pytest.approx(size * batch * 256 / at.seconds)
        assert at.efficiency == pytest.approx(batch / at.seconds * curve.base.step_time.value
                                              / (4 if curve.mode == "weak" else 64), rel=1e-6)
        assert (at.size, at.ranks) == (size, size)


def test_coefficients_are_the_best_nonnegative_ones() -> None:
    rng, zeros = np.random.default_rng(0), 0
    sizes = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    for _ in range(100):
        times = rng.uniform(0.05, 0.2, len(sizes))
        fit = fit_curve(curve_of(times.tolist(), (1, 2, 4, 8, 16)))
        table = np.column_stack([1 / sizes, 1 - 1 / sizes, np.log2(sizes)]) / times[:, None]
        deviations = table @ coefficients(fit) - 1
        assert fit.residual == pytest.approx(math.sqrt((deviations**2).mean()))
        # Optimal: no positive coefficient can be improved, and no zero one can be increased.
        for value, slope in zip(coefficients(fit), table.T @ deviations, strict=True):
            assert value >= 0
            assert slope == pytest.approx(0, abs=1e-9) if value else slope >= -1e-9
            zeros += not value
    assert zeros > 50


def test_residual_shows_sizes_that_do_not_fit() -> None:
    smooth, bent = (fit_curve(curve_of(times)) for times in ([0.1, 0.11, 0.12, 0.13], [0.1, 0.14, 0.11, 0.15]))
    assert smooth.residual < 0.01 < 0.1 < bent.residual
    assert not smooth.is_exact
    falling = fit_curve(curve_of([0.1, 0.09, 0.085], (1, 2, 4)))
    assert falling.doubling == 0
    assert not falling.is_exact, "three sizes, but two terms"


def test_fit_requires_three_sizes() -> None:
    with pytest.raises(UserError, match="it requires 3 sizes, and the study has 1, 2"):
        fit_curve(curve_of([0.1, 0.12], (1, 2)))


def test_sizes_that_cannot_be_extrapolated() -> None:
    weak, strong = (fit_curve(curve) for curve in curves_of(points_of(
        study(ddp, np.random.default_rng(2), modes=("weak", "strong")))))
    assert extrapolate(weak, 16).size == 16
    with pytest.raises(UserError, match="no extrapolation to 17 nodes: the study measured 1 to 4") as error:
        extrapolate(weak, 17)
    assert "1 to 16 nodes" in error.value.instead
    assert extrapolate(weak, 12).ranks == 12
    with pytest.raises(UserError, match="batch of 64 cannot be divided over 12 data-parallel ranks"):
        extrapolate(strong, 12)
    stages = fit_curve(curves_of(points_of([repeat("weak", n, dp=n // 2) for n in (2, 4, 8)]))[0])
    assert extrapolate(stages, 12).ranks == 12
    with pytest.raises(UserError, match=r"5 nodes are 2\.5 data-parallel ranks"):
        extrapolate(stages, 5)
