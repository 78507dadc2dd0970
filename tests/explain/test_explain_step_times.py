"""Causes found from step times alone: made-up histories, each with one thing wrong, and a run directory."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from slowness import scaled

from ezpz_llm.explain.step_times import StepTimes, step_time_causes, step_times
from ezpz_llm.observe.history import make_history
from ezpz_llm.rundir import RunDir, append_line

STEPS = 200


def rows(times: np.ndarray, data_s: np.ndarray | float = 0.001):
    """Lines of metrics.jsonl of steps that take so many seconds."""
    data = np.broadcast_to(data_s, times.shape)
    return [{"step": step, "loss": 3.0, "lr": 1e-3, "grad_norm": 1.0, "step_time_s": float(seconds),
             "data_s": float(waits), "forward_s": float(0.3 * (seconds - waits)),
             "backward_s": float(0.6 * (seconds - waits)), "optimizer_s": float(0.1 * (seconds - waits)),
             "other_s": 0.0}
            for step, (seconds, waits) in enumerate(zip(times, data, strict=True), 1)]


def causes(times: np.ndarray, data_s: np.ndarray | float = 0.001):
    """By kind."""
    history = make_history(rows(times, data_s), "x")
    return {cause.kind: cause for cause in step_time_causes(history, float(times.sum()))}


def even() -> np.ndarray:
    return 0.1 + 0.002 * np.sin(np.arange(STEPS))


def test_even_steps_have_no_cause():
    found = causes(even())
    assert all(cause.share < 0.002 for cause in found.values()), found


def test_a_shared_machine_shows_in_the_spread():
    found = causes(np.where(np.arange(STEPS) % 2, 0.1, 0.2))
    assert list(found) == ["unsteady"]
    assert found["unsteady"].share == pytest.approx(1 / 3, abs=0.02)
    assert "by a factor of 2 (100 to 200 ms), most of it in backward" in found["unsteady"].what


def test_steps_that_vary_by_their_data_are_said_to():
    data = np.where(np.arange(STEPS) % 2, 0.001, 0.101)
    found = causes(0.1 + data, data)
    assert "most of it in data" in found["unsteady"].what
    assert "file system" in found["unsteady"].advice[0]


def test_drift_is_not_counted_twice():
    found = causes(np.linspace(0.1, 0.2, STEPS))
    assert found["drift"].seconds + found["unsteady"].seconds < 0.06 * STEPS
    assert "steps become slower: 11" in found["drift"].what


def test_pauses_and_first_steps_are_by_themselves():
    times = even()
    times[100] = times[150] = 2.0
    times[0] = 5.0
    found = causes(times)
    assert {"pauses", "first_steps"} <= set(found)
    assert found["pauses"].seconds == pytest.approx(3.8, abs=0.02)
    assert found["first_steps"].seconds == pytest.approx(4.9, abs=0.02)


def test_of_a_few_steps_nothing_is_said():
    assert causes(np.array([1.0, 0.1, 0.3, 0.1, 0.3])) == {}
    assert step_times(make_history(rows(np.array([np.nan])), "x"), None) is None


def test_who_has_traces_is_not_told_to_make_them():
    times = StepTimes(0.1, 0.1, 0.1, peak_share=0.07)
    assert "--trace-steps" in times.sentence(is_traced=False)
    assert times.sentence(is_traced=True).endswith("a larger --micro-batch-size, --compile true.")


def test_the_largest_is_said_first(tmp_path):
    """Steps spread by a factor of two at 7 % of the peak come before evaluation at 3 %."""
    times = np.where(np.arange(STEPS) % 2, 0.164, 0.382)
    run_dir = RunDir(tmp_path / "run").create()
    for line in rows(times):
        append_line(run_dir.metrics, line)
    wall = {"set-up": 5.0, "training": float(times.sum()), "evaluation": 0.03 * float(times.sum())}
    run_dir.record.write_text(json.dumps({
        "config": {}, "environment": {"world_size": 2}, "summary": {"wall": wall, "ceiling_share": 0.069}}))
    done = subprocess.run([sys.executable, "-m", "ezpz_llm.explain", str(run_dir.path)], capture_output=True,
                          text=True, timeout=scaled(60), check=False)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "164 to 382 ms for the middle 80 %. Steps reach 6.9% of the matmul peak measured here." in text
    places = [text.index(words) for words in ("6.9%", "1. ", "steps vary by a factor of 2.3", "evaluation")]
    assert places == sorted(places)
