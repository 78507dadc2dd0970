"""Efficiency and intervals of synthetic studies with a known step-time law, and causes of values above 100 %."""

from __future__ import annotations

import math

import numpy as np
import pytest
from msgspec.structs import replace
from scale_laws import noisy, repeat, study

from ezpz_llm.verify.scaling.efficiency import Estimate, curves_of, estimate, points_of, ratio, student_t_quantile
from ezpz_llm.verify.scaling.tables import interval_text

QUIET = {"runs": 1e-4, "within": 1e-4}


def ddp(mode: str, n: int, q: float, a: float) -> float:
    """Return seconds per step: 25 ms per sequence, a 60 ms ring, 4 ms per doubling."""
    return 0.025 * q + 0.06 * (n - 1) / n + 0.004 * math.log2(n)


def curves(repeats):
    return curves_of(points_of(repeats))


def test_student_quantiles_match_published_tables():
    for freedom, table in ((1, 12.7062), (2, 4.30265), (4, 2.77645), (10, 2.22814), (30, 2.04227)):
        assert student_t_quantile(0.95, freedom) == pytest.approx(table, rel=1e-5)
    assert student_t_quantile(0.95, 1.3) == pytest.approx(7.50053, rel=1e-4), "the density has a cusp there"
    assert 3.182 < student_t_quantile(0.95, 2.5) < 4.303, "Welch's degrees of freedom are not integers"
    assert student_t_quantile(0.95, 1e9) == pytest.approx(1.96, abs=0.01)


@pytest.mark.full
@pytest.mark.parametrize(("runs", "uneven", "at_least", "at_most"),
                         [(1, 1, 0.88, 0.96), (2, 3, 0.94, 1.0), (3, 1, 0.92, 0.98), (3, 3, 0.91, 0.98),
                          (5, 3, 0.92, 0.98)])
def test_intervals_have_nominal_coverage(runs, uneven, at_least, at_most):
    rng, covered, studies = np.random.default_rng(runs), 0, 300
    for _ in range(studies):
        spread = 0.0 if runs == 1 else 0.02
        first = estimate([noisy(1.0, rng, runs=spread, within=0.05, steps=60) for _ in range(runs)])
        second = estimate([noisy(1.3, rng, runs=uneven * spread, within=0.05, steps=60) for _ in range(runs)])
        low, high = ratio(first, second).interval or (0.0, math.inf)  # None if it is too wide
        covered += low <= 1 / 1.3 <= high
    assert at_least <= covered / studies <= at_most


def test_estimate_basis_tells_runs_from_steps():
    assert estimate([[0.1] * 20]).basis == "steps"
    assert estimate([[0.1] * 5]).basis == "none"
    assert estimate([[0.1] * 5]).interval is None
    single, several = estimate([[0.1, 0.11] * 20]), estimate([[0.1] * 5, [0.11] * 5])
    assert several.basis == "runs"
    assert ratio(single, several).basis == "steps", "the weaker basis of both"
    assert ratio(several, Estimate(0.0, 0.0, 0, "none")).interval is None


def test_efficiency_of_weak_and_strong_scaling():
    weak, strong = curves(study(ddp, np.random.default_rng(0), modes=("weak", "strong"), **QUIET))
    assert [curve.name for curve in (weak, strong)] == ["weak ddp", "strong ddp"]
    for curve in (weak, strong):
        assert curve.efficiency(curve.base).value == 1
        for point in curve.points[1:]:
            n, batch = point.ranks, 4 if curve is weak else 64
            q = 4 if curve is weak else 64 / n
            speed = (n * q / ddp("", n, q, 1)) / (batch / ddp("", 1, batch, 1))
            assert curve.speed_up(point) == pytest.approx(speed, rel=2e-3)
            assert curve.efficiency(point).value == pytest.approx(speed / n, rel=2e-3)
            low, high = curve.efficiency(point).interval
            assert high - low < 0.002, "little noise gives a narrow interval"
    assert weak.unit == "nodes"
    on_one_node, = curves([replace(repeat, nodes=1) for repeat in study(ddp, np.random.default_rng(0))])
    assert on_one_node.unit == "ranks"


def test_notes_on_failed_runs_and_incomparable_points():
    repeats = study(ddp, np.random.default_rng(0))
    repeats[4] = replace(repeats[4], error="out of memory", step_times_s=(), tokens_per_second=None)
    lost = [replace(result, error="node down", step_times_s=()) if result.ranks == 4 else result
            for result in repeats]
    repeats[0] = replace(repeats[0], last_loss=6.0)
    curve, = curves(repeats)
    assert set(curve.notes) == {"weak-ddp-n1-r1: the loss did not decrease, so its throughput is not meaningful",
                                "weak-ddp-n2-r2: 1 of 3 runs failed"}
    assert [point.ranks for point in curves(lost)[0].points] == [1, 2]
    assert points_of(lost)[-1].errors == ("node down",)
    uneven, = curves([repeat("weak", 1), repeat("weak", 2, micro_batch=8)])
    assert "not weak scaling" in uneven.notes[0]
    disturbed, = curves([repeat("weak", n, number, steps=[0.1 * (1 + 17 * (n == 1) * number)] * 20)
                         for n in (1, 2) for number in range(2)])
    assert "weak-ddp-n1-r1: its slowest run took 18.0 times as long as its fastest" in disturbed.notes[0]
    assert disturbed.superlinear_note(disturbed.points[1]).endswith("is within the noise of 100 %")
    assert interval_text(disturbed.efficiency(disturbed.points[1])) == "too wide"
    uneven, = curves([repeat("strong", 1), repeat("strong", 2)])
    assert "not strong scaling" in uneven.notes[0]


def above(base_changes, changes, seconds=(0.1, 0.09)):
    curve, = curves([repeat("weak", ranks, number, steps=[time * (0.99 + 0.01 * number)] * 20, **more)
                     for ranks, time, more in zip((1, 2), seconds, (base_changes, changes), strict=True)
                     for number in range(3)])
    return curve.superlinear_note(curve.points[1])


def test_efficiency_above_one_has_a_note():
    assert above({}, {}, (0.1, 0.12)) is None
    assert "within the noise" in above({}, {}, (0.1, 0.099))
    note = above({}, {}, (0.1, 0.09))
    assert note.startswith("its efficiency of 111.1% is above 100 %, so the baseline weak-ddp-n1-r1 does more work")
    assert "ezpz-llm explain " in note
    single, = curves([repeat("weak", 1, steps=(0.1,) * 5), repeat("weak", 2, steps=(0.09,) * 5)])
    assert single.superlinear_note(single.points[1]).endswith("its error is unknown: measure with --repeats 3")
