"""Profiles: files name the functions that ran in the window."""

from __future__ import annotations

import gzip
import json
import time

import pytest
import torch

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training.observe import PythonProfile, StepTimeline, TraceProfile, Window, profile_window


def a_slow_collate_function():
    deadline = time.perf_counter() + 0.01
    while time.perf_counter() < deadline:
        sum(range(100))


def a_function_of_a_later_step():
    a_slow_collate_function()


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path / "run").create()


def test_host_profile_has_only_functions_of_its_window(run_dir):
    profile = PythonProfile(run_dir, Window(2, 3))
    for step in range(8):
        profile.before_step(step)
        a_slow_collate_function() if 2 <= step < 5 else a_function_of_a_later_step()
        profile.after_step(step)
        assert (profile.path is not None) == (step >= 4)
    text = (run_dir.profile / "host.txt").read_text()
    assert "a_slow_collate_function" in text
    assert "a_function_of_a_later_step" not in text
    assert "\x1b" not in text
    assert profile.path == run_dir.profile / "host.html"
    page = profile.path.read_text()
    assert "<html" in page
    assert "a_slow_collate_function" in page
    assert "fonts.googleapis" not in page, "the page needs no network"
    assert 'r.href="data:text/css,"' in page, "pyinstrument's font request is replaced"
    seconds = json.loads((run_dir.profile / "host.json").read_text())
    assert set(seconds) == {"torch", "deepspeed", "ezpz_llm", "other"}
    assert seconds["other"] > 0.02
    assert seconds["torch"] + seconds["deepspeed"] == 0


def test_time_in_torch_is_attributed_to_torch(run_dir):
    profile, square = PythonProfile(run_dir, Window(0, 1)), torch.nn.Linear(1000, 1000)
    profile.before_step(0)
    for _ in range(20):
        square(torch.zeros(1000, 1000)).sum().backward()
    profile.after_step(0)
    seconds = json.loads((run_dir.profile / "host.json").read_text())
    assert seconds["torch"] > 0.7 * sum(seconds.values())


def test_run_that_ends_inside_the_window_writes_its_profile(run_dir):
    profile = PythonProfile(run_dir, Window(0, 20))
    profile.before_step(0)
    a_slow_collate_function()
    profile.close()
    profile.close()
    assert "a_slow_collate_function" in (run_dir.profile / "host.txt").read_text()
    untouched = PythonProfile(run_dir, Window(5, 1))
    untouched.close()
    assert untouched.path is None


@pytest.mark.parametrize(("first", "total", "window"), [
    (0, 1500, Window(5, 20)), (500, 1500, Window(505, 20)), (0, 10, Window(5, 5)), (0, 2, Window(1, 1)),
    (7, 8, Window(7, 1)), (0, 26, Window(5, 20)), (10, 10, None),
])
def test_window_fits_the_run(first, total, window):
    assert profile_window(first, total) == window


@pytest.mark.parametrize("steps", [1, 3])
def test_trace_has_operators_in_named_phases(run_dir, steps):
    timeline = StepTimeline(torch.device("cpu"))
    trace = TraceProfile(run_dir, 0, Window(1, steps))
    for step in range(6):
        trace.before_step(step)
        timeline.begin_step()
        with timeline.span("forward"):
            torch.randn(32, 32) @ torch.randn(32, 32)
        timeline.end_step()
        trace.after_step(step)
    assert trace.path == run_dir.profile / "trace-rank0000.json.gz"
    with gzip.open(trace.path, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = [event.get("name") for event in events]
    assert "aten::mm" in names
    assert names.count("forward") == steps
