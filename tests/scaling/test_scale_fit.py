"""Efficiency, intervals, fits and predictions of synthetic studies with a known step-time law."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scale_laws import noisy, repeat, study

from ezpz_llm.base.errors import UserError
from ezpz_llm.certify.case import published_traffic
from ezpz_llm.layout.resolve import Request, resolve
from ezpz_llm.model.config import MODELS
from ezpz_llm.observe.traffic import textbook_bytes
from ezpz_llm.rundir import RunDir
from ezpz_llm.scaling.efficiency import Estimate, curves_of, estimate, points_of, ratio, student_t_quantile
from ezpz_llm.scaling.findings import Extrapolation
from ezpz_llm.scaling.fit import (
    Fit,
    Setting,
    Shape,
    explain_predicted,
    explain_superlinear,
    extrapolation_sizes,
    find_target,
    fit_line,
    predict,
    shape_of,
)
from ezpz_llm.scaling.tables import fit_notes, interval_text

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
        low, high = ratio(first, second).interval
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
    cause, = explain_superlinear(disturbed, disturbed.points[1])
    assert "differ by a factor of 18.0" in cause
    assert interval_text(disturbed.efficiency(disturbed.points[1])) == "too wide"
    uneven, = curves([repeat("strong", 1), repeat("strong", 2)])
    assert "not strong scaling" in uneven.notes[0]


def above(base_changes, changes, seconds=(0.1, 0.09)):
    curve, = curves([repeat("weak", ranks, number, steps=[time * (0.99 + 0.01 * number)] * 20, **more)
                     for ranks, time, more in zip((1, 2), seconds, (base_changes, changes), strict=True)
                     for number in range(3)])
    return explain_superlinear(curve, curve.points[1])


def test_efficiency_above_one_has_a_cause():
    assert above({}, {}, (0.1, 0.12)) == (), "nothing to explain"
    assert "within the noise" in above({}, {}, (0.1, 0.099))[0]
    cause, = above({"accumulation": 4}, {"accumulation": 2}, (0.2, 0.09))
    assert "fewer micro-steps per step (2, at the smallest point 4)" in cause
    cause, = above({"peak_device_bytes": 38 * 2**30}, {"peak_device_bytes": 20 * 2**30})
    assert "20.00 GiB of device memory, at the smallest point 38.00" in cause
    parts = {"compute": 0.06, "exposed_communication": 0.0, "data": 0.001, "optimizer": 0.038, "other": 0.001}
    cause, = above({"split": parts}, {"split": {**parts, "exposed_communication": 0.01, "optimizer": 0.018}})
    assert cause.startswith("optimizer takes 20.0 ms per step less for the same tokens (its state is sharded over")
    cause, = above({"nodes": 1}, {"nodes": 1}, (0.1, 0.09))
    assert "not explained" in cause
    assert "do not use this number" in cause
    single, = curves([repeat("weak", 1, steps=(0.1,) * 5), repeat("weak", 2, steps=(0.09,) * 5)])
    assert "its error is unknown" in explain_superlinear(single, single.points[1])[0]
    unsteady, = curves([repeat("weak", 1, number, steps=[0.1] * 15 + [0.2] * 5) for number in range(3)]
                       + [repeat("weak", 2, number, steps=[0.09] * 20) for number in range(3)])
    assert "was not steady" in explain_superlinear(unsteady, unsteady.points[1])[0]


def test_fit_recovers_law_without_noise():
    fit = Fit(curves(study(ddp, np.random.default_rng(0), modes=("weak", "strong"), **QUIET)), Shape())
    assert fit.terms == ("work", "bandwidth", "latency, tree")
    assert fit.error < 1e-3
    row = next(row for row in fit.rows if row.point.name == "weak-ddp-n4-r4")
    assert row.parts["work"] == pytest.approx(0.1, rel=0.01)
    assert row.parts["bandwidth"] == pytest.approx(0.045, rel=0.05)
    assert row.parts["latency, tree"] == pytest.approx(0.008, rel=0.15)


def test_fit_separates_serial_sharded_and_pipeline_terms():
    def serial(mode, n, q, a):
        return 0.025 * q + 0.05 + 0.003 * (n - 1)

    def sharded(mode, n, q, a):
        return 0.025 * q + 0.03 / n + 0.04 * a * (n - 1) / n

    for law, shape, terms in ((serial, Shape(), {"work", "serial", "latency, ring"}),
                              (sharded, Shape(1, True, True), {"work", "divided", "bandwidth"})):
        fit = Fit(curves(study(law, np.random.default_rng(1), modes=("weak", "strong"), **QUIET)), shape)
        assert set(fit.terms) == terms
        assert fit.error < 2e-3

    def pipeline(mode, n, q, a):  # two stages on two ranks, n / 2 pipelines
        return 0.025 * q * (1 + 1 / a) + 0.02 * (n / 2 - 1) / (n / 2)

    rng = np.random.default_rng(2)
    stages = [repeat("strong", n, number, ds_config="pp2", dp=n // 2, accumulation=32 // n,
                     steps=noisy(pipeline("", n, 4 * 32 / n / 2, 32 / n), rng, **QUIET))
              for n in (2, 4, 8, 16) for number in range(3)]
    fit = Fit(curves(stages), Shape(pp=2))
    for row in fit.rows:
        m = row.point.first.accumulation
        assert row.parts["bubble"] == pytest.approx(row.parts["work"] / m)
    assert fit.error < 2e-3


def within(layout, dp, size, alone=False):
    return Setting(size, dp, 256.0, 1.0, alone, Shape(1, True, True, layout)).terms


def test_traffic_of_shard_groups_matches_layout(tmp_path):
    for name, expected in (("fsdp2", None), ("fsdp2_within2", 2)):
        run_dir = RunDir(tmp_path / name).create()
        resolve(Request(name, world_size=4)).write(run_dir)
        assert shape_of(run_dir.path) == Shape(1, True, True, expected)

    # With ranks as sizes, all traffic is between ranks: the ratio of the terms is that of the bytes moved.
    model = MODELS["tiny-gpt2"]
    for dp in (2, 4, 8, 16):
        moved = {}
        for name in ("fsdp2", "fsdp2_within2"):
            run = resolve(Request(name, world_size=dp))
            moved[name] = sum(textbook_bytes(kind.partition(" (")[0], size,
                                             int(kind.partition(" (")[2].partition(" ")[0] or dp))
                              for kind, size in published_traffic(run.layout, model, run.batch).items())
        assert within(2, dp, dp)[3] / within(None, dp, dp)[3] == pytest.approx(
            moved["fsdp2_within2"] / moved["fsdp2"])

    # A shard group per node: traffic within a group does not depend on the size; all-reduces cross nodes.
    copies = 8 / 2
    assert within(2, 8, 4)[3] == pytest.approx((2 / 6) * (copies - 1) / copies)
    assert within(2, 8, 4)[2] == within(2, 2, 1, alone=True)[2] == 1 / 2
    assert within(2, 2, 1, alone=True)[3] == 0
    assert within(2, 8, 4)[4:].tolist() == within(None, 8, 4)[4:].tolist() == [2, 3]
    assert within(8, 8, 4).tolist() == within(16, 8, 4).tolist() == within(None, 8, 4).tolist()


@pytest.mark.parametrize("modes", [("weak",), ("strong",), ("weak", "strong")])
def test_bands_have_nominal_coverage_at_four_times_the_largest_size(modes):
    def ring(mode, n, q, a):
        return 0.025 * q + 0.003 * (n - 1)

    def flat(mode, n, q, a):
        return 0.025 * q

    def serial(mode, n, q, a):
        return 0.025 * q + 0.05 + 0.03 * (n - 1) / n + 0.002 * (n - 1)

    covered, studies = {"time": 0, "efficiency": 0}, 0
    for law in (ddp, ring, flat, serial):
        for seed in range(40):
            measured = curves(study(law, np.random.default_rng(seed), modes=modes, strong_batch=256))
            fit, curve = Fit(measured, Shape()), measured[-1]
            at = predict(fit, curve, 16)
            base, q = (4.0, 4.0) if curve.mode == "weak" else (256.0, 256 / 16)
            true, first = law("", 16, q, 1), law("", 1, base, 1)
            studies += 1
            covered["time"] += at.seconds_band[0] <= true <= at.seconds_band[1]
            covered["efficiency"] += at.efficiency_band[0] <= q / true / (base / first) <= at.efficiency_band[1]
    assert all(count / studies >= 0.9 for count in covered.values()), covered


def test_bands_have_nominal_coverage_with_a_single_run_of_the_largest_point():
    """The error of that point must come from runs: the steps of its only run vary less than runs do."""
    covered = 0
    for seed in range(60):
        repeats = study(ddp, np.random.default_rng(seed), within=0.005)
        repeats[-2:] = [replace(repeat, error="killed", step_times_s=()) for repeat in repeats[-2:]]
        curve, = measured = curves(repeats)
        low, high = predict(Fit(measured, Shape()), curve, 16).seconds_band
        covered += low <= ddp("", 16, 4, 1) <= high
    assert covered >= 0.9 * 60, covered


def test_predicted_efficiency_above_one_has_a_cause():
    def divided(mode, n, q, a):
        return 0.025 * q + 0.08 / n

    curve, = measured = curves(study(divided, np.random.default_rng(1), **QUIET))
    fit = Fit(measured, Shape(1, False, True))
    at = predict(fit, curve, 16)
    assert at.efficiency > 1.5
    reason = explain_predicted(fit, at)
    assert reason.startswith("the term divided of the fit takes 75.")
    assert "sharded over more ranks" in reason
    without_gain = replace(at, parts={**at.parts, "divided": fit.rows[0].parts["divided"]})
    assert "not explained" in explain_predicted(fit, without_gain)
    assert "within the noise" in explain_predicted(fit, replace(at, efficiency_band=(0.97, 1.6)))
    assert explain_predicted(fit, replace(at, efficiency=0.99)) is None
    assert any("above 100 %: the term divided of the fit" in note
               for note in fit_notes(Extrapolation("zero1", fit, "", (at,))))


def test_sizes_that_cannot_be_predicted():
    weak, strong = measured = curves(study(ddp, np.random.default_rng(2), modes=("weak", "strong")))
    fit = Fit(measured, Shape())
    with pytest.raises(UserError, match="no prediction for 17 nodes: the study measured 1 to 4") as error:
        predict(fit, weak, 17)
    assert "1 to 16 nodes" in error.value.instead
    assert predict(fit, weak, 3).beyond is False
    assert predict(fit, weak, 16).beyond is True
    with pytest.raises(UserError, match="batch of 64 in micro-batches of 4 cannot be divided over 12"):
        predict(fit, strong, 12)
    assert extrapolation_sizes(strong) == [1, 2, 4, 8, 16]
    assert max(size for size, _, _ in fit_line(fit, weak)) == 16


def test_prediction_of_strong_curve_with_smaller_micro_batches():
    rng = np.random.default_rng(5)
    curve, = measured = curves([repeat("strong", n, number, micro_batch=micro, accumulation=steps,
                                       steps=noisy(ddp("", n, 8 / n, 1), rng, **QUIET))
                                for n, micro, steps in ((1, 4, 2), (2, 4, 1), (4, 2, 1)) for number in range(3)])
    assert extrapolation_sizes(curve) == [1, 2, 4, 8]
    assert predict(Fit(measured, Shape()), curve, 8).tokens_per_second > 0


def test_fit_requires_three_sizes_and_a_known_error():
    with pytest.raises(UserError, match="requires 3 sizes, and the study has 1, 2"):
        Fit(curves(study(ddp, np.random.default_rng(0), sizes=(1, 2))), Shape())
    with pytest.raises(UserError, match="the error of some points is unknown"):
        Fit(curves([repeat("weak", n, steps=(0.1,) * 4) for n in (1, 2, 4)]), Shape())
    Fit(curves(study(ddp, np.random.default_rng(0), repeats=1)), Shape())


def test_target_size_matches_law():
    rng = np.random.default_rng(4)
    measured = curves(study(ddp, rng, modes=("weak", "strong"), sizes=(1, 2, 4, 8), runs=0.003, within=0.01))
    fit, weak = Fit(measured, Shape()), measured[0]

    def true(n):
        return ddp("", 1, 4, 1) / ddp("", n, 4, 1)

    for target in (0.9, 0.7, 0.6):
        result = find_target(fit, weak, target)
        last = max((n for n in range(1, 33) if true(n) >= target), default=None)
        assert result.sure <= last <= result.possible
        assert result.sure <= result.size <= result.possible
    low = find_target(fit, weak, 0.3)
    assert low.size == low.limit == 32
    assert "32 or more nodes" in low.describe()
    with pytest.raises(UserError, match="target efficiency of 80"):
        find_target(fit, weak, 80)


def test_unexplained_deviations_widen_the_band():
    def bent(mode, n, q, a):
        return 0.1 * {1: 1.0, 2: 1.3, 4: 1.1, 8: 1.4, 16: 1.15}[n]

    def straight(mode, n, q, a):
        return 0.1 * (1 + 0.02 * math.log2(n))

    widths = []
    for law in (bent, straight):
        rng = np.random.default_rng(0)
        curve, = measured = curves(study(law, rng, sizes=(1, 2, 4, 8, 16), runs=0.003, within=0.01))
        fit = Fit(measured, Shape())
        low, high = predict(fit, curve, 32).seconds_band
        widths.append(high / low - 1)
    assert widths[0] > 5 * widths[1]
    assert widths[0] > 0.1
