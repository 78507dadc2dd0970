"""Text plots: unusual series, plain files, and scales of steady steps."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
from slowness import scaled

from ezpz_llm.core.rundir import RunDir, append_line, read_lines
from ezpz_llm.training.observe import plot_run, series_plot, wants_ascii, wants_color
from ezpz_llm.training.observe.history import make_history
from ezpz_llm.training.observe.plots import downsample

# Runs in a subprocess, since plotext's C++ part aborts the process for invalid values.
UNUSUAL = """
import json, sys
from ezpz_llm.training.observe.plots import series_plot
nan, inf = float("nan"), float("inf")
series = {
    "empty": ([], []), "one point": ([3], [2.0]), "constant": ([1, 2, 3], [5, 5, 5]),
    "nan": ([1, 2, 3, 4], [1, nan, inf, None]), "only nan": ([1, 2], [nan, nan]),
    "nan in x": ([1, nan, 3], [1, 2, 3]),
    "huge": ([1, 2, 3], [1, 1e30, 3]), "past huge": ([1, 2], [1e308, -1e308]), "tiny": ([1, 2], [1e-300, 2e-300]),
    "negative": ([1, 2], [-1e30, 0]), "same x": ([2, 2], [1, 3]),
    "many": (list(range(100000)), list(range(100000))),
}
plots = {name: series_plot(x, y, "t", "step", "s", 60, 10) for name, (x, y) in series.items()}
plots["wide"] = series_plot([1, 2], [1, 2], "t", "step", "s", 100, 30)
json.dump(plots, sys.stdout)
"""


def test_unusual_series_are_plotted_or_report_why_not():
    result = subprocess.run([sys.executable, "-c", UNUSUAL], env={**os.environ, "COLUMNS": "40", "LINES": "8"},
                            capture_output=True, text=True, timeout=scaled(60))
    assert result.returncode == 0, result.stderr
    plots = json.loads(result.stdout)
    wide = plots.pop("wide").splitlines()
    assert (len(wide), max(map(len, wide))) == (30, 100), "a plot has the requested size for any terminal"
    nothing = {"empty", "only nan", "past huge"}
    for name, text in plots.items():
        assert ("nothing to draw" in text) == (name in nothing), name
        assert all(len(line) <= 60 for line in text.splitlines()), name
    assert "1e+30" in plots["huge"]
    assert len(plots["many"].splitlines()) == 10


def make_run(tmp_path, steps=200):
    run_dir = RunDir(tmp_path / "run").create()
    for step in range(1, steps + 1):
        slow = step in (1, steps)
        append_line(run_dir.metrics, {
            "step": step, "loss": None if step == 50 else 5 - step / 100, "step_time_s": 9.0 if slow else 0.1,
            "tokens_per_second": 10.0 if slow else 1000.0 + step,
            **({"val_loss": 5.25 - step / 100} if step % 100 == 0 else {})})
    return run_dir


def test_plots_of_a_run_are_plain_files_without_the_first_and_last_step(tmp_path):
    run_dir = make_run(tmp_path)
    shown = plot_run(run_dir, width=72)
    files = {path.name: path.read_text() for path in run_dir.plots.iterdir()}
    assert set(files) == {"loss.txt", "tokens_per_second.txt"}, "step time is the inverse of tokens/s"
    assert files["loss.txt"] in shown
    assert "tokens/s over step" in shown
    assert "step time" not in shown, "step time is the inverse of tokens/s"
    for text in files.values():
        assert "\x1b" not in text
        assert all(len(line) <= 72 for line in text.splitlines())
    assert "line: training, o: validation" in files["loss.txt"]
    assert sum(line.count("o") for line in files["loss.txt"].splitlines()[1:]) == 2
    (run_dir.plots / "tokens_per_second.txt").unlink()
    lines = [{name: value for name, value in line.items() if not name.startswith("tokens_")}
             for line in read_lines(run_dir.metrics)]
    plot_run(run_dir, width=72, history=make_history(lines, "x"))
    times = (run_dir.plots / "step_time_s.txt").read_text()
    assert not (run_dir.plots / "tokens_per_second.txt").exists()
    assert "100┤" in times, "the scale is that of steady steps, 100 ms"
    assert "9000" not in times
    coloured = plot_run(run_dir, width=72, color=True)
    assert "\x1b[" in coloured
    assert "\x1b" not in (run_dir.plots / "loss.txt").read_text()


def test_run_without_steps_still_writes_its_plots(tmp_path):
    run_dir = RunDir(tmp_path / "run").create()
    assert plot_run(run_dir).count("nothing to draw") == 2
    assert len(list(run_dir.plots.iterdir())) == 2


def test_color_is_used_only_on_a_color_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert wants_color(Terminal())
    assert not wants_color(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_color(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert wants_color(Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(Terminal())


@pytest.mark.parametrize(("env", "encoding", "ascii_only"), [
    ({}, "utf-8", False), ({"LANG": "en_US.UTF-8"}, "utf-8", False), ({"LANG": "C"}, "utf-8", True),
    ({"LC_ALL": "C", "LANG": "en_US.UTF-8"}, "utf-8", True), ({"LC_ALL": "C.UTF-8", "LANG": "C"}, "utf-8", False),
    ({}, "latin-1", True), ({"LANG": "POSIX"}, "utf-8", True)])
def test_ascii_is_used_if_other_characters_cannot_be_shown(env, encoding, ascii_only):
    assert wants_ascii(io.TextIOWrapper(io.BytesIO(), encoding), env) == ascii_only


@pytest.mark.parametrize("length", [10, 160, 161, 1500, 9999])
def test_downsampling_keeps_means_and_order(length):
    x, y = downsample(list(range(length)), [float(i) for i in range(length)], 160)
    assert len(x) == len(y) == min(length, 160)
    assert x == sorted(x)
    assert x == y
    assert sum(y) / len(y) == pytest.approx((length - 1) / 2, rel=0.01)


def test_plot_has_axis_names():
    text = series_plot([1, 2, 3], [3.0, 2.0, 1.0], "loss", "iter", "nats", 60, 12)
    assert text.splitlines()[0].strip() == "loss (nats) over iter"
    assert len(text.splitlines()) == 12
