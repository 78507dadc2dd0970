"""HTML page and figures of runs: content, points of curves, hostile names, and missing matplotlib."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import numpy as np
import pytest
from made_up_runs import make_run
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from pages import check_narrow_page, check_page, figure_text
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.report.command import main
from ezpz_llm.training.report.figures import Figure, Panel, bars_figure, render
from ezpz_llm.training.report.run_page import report_figures, report_page
from ezpz_llm.training.report.runs import load_runs

WITHOUT_MATPLOTLIB = ("import sys; sys.modules['matplotlib'] = None; from ezpz_llm.core.base import run_command; "
                      "from {} import main; sys.exit(run_command(main, sys.argv[1:]))")


def drawn(panel: Panel) -> Axes:
    """Return axes with the curves of a panel."""
    axes = Drawing().subplots()
    panel.draw(axes)
    return axes


def write_steps(folder: Path, losses: list[float | None]) -> Path:
    """Write a run with these losses, which are also its gradient norms."""
    make_run(folder, range(1, 2))
    (folder / "metrics.jsonl").write_text("".join(json.dumps({
        "step": step, "loss": loss, "grad_norm": loss, "step_time_s": 0.1, "tokens_per_second": 20480}) + "\n"
        for step, loss in enumerate(losses, 1)))
    return folder


def test_command_prints_report_and_writes_page(tmp_path):
    folders = [make_run(tmp_path / name, range(1, last), lr=lr) for name, last, lr in
               (("first", 101, 0.004), ("second", 61, 0.5))]
    command = [sys.executable, "-m", "ezpz_llm.report", *map(str, folders), "--html", "page.html"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(60), check=False,
                         env={**os.environ, "COLUMNS": "90"})
    assert run.returncode == 0, run.stderr
    assert "\x1b" not in run.stdout
    plots = run.stdout.split("loss (nats/token)")[1]
    assert {"A", "B"} <= set(plots.split("tokens/s")[0]), "each run has its letter"
    assert "  A first\n  B second\n" in run.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "page.html", "second"]
    unwritable = subprocess.run([*command[:-1], "nowhere/page.html"], cwd=tmp_path, capture_output=True, text=True,
                                timeout=scaled(60), check=False)
    assert unwritable.returncode == 2
    assert "--html nowhere/page.html" in unwritable.stderr


def test_page_has_tables_and_figures(tmp_path):
    runs = load_runs([make_run(tmp_path / name, lr=lr, precision=name)
                      for name, lr in (("fp32", 0.1), ("bf16", 0.5))])
    page = report_page(runs)
    figures = check_page(page)
    assert re.findall("<h2>(.*?)</h2>", page) == ["Results", "Differences", "Curves", "Settings"]
    assert "warning: the runs differ in 2 settings (lr, precision)" in page
    assert "fp32: finished, step 100 of 100" in page
    assert "launch -n 2" in page
    curves, details, breakdown = figures.values()
    assert {"fp32", "bf16", "fp32, validation", "tokens", "loss (nats/token)", "tokens/s"} <= {*figure_text(curves)}
    assert {"step", "hours in steps", "tokens/s per device", "gradient norm before clipping", "learning rate"} <= \
        {*figure_text(details)}
    assert {"fp32", "bf16", "data", "forward", "backward", "optimizer", "other", "ms"} <= {*figure_text(breakdown)}
    assert "Differences" not in report_page(runs[:1])


def test_figures_for_narrow_screens_have_their_panels_below_each_other(tmp_path):
    page = report_page(load_runs([make_run(tmp_path / "a")]))
    assert "@media (prefers-color-scheme: dark)" in page
    assert 'media="(max-width: 699px)"' in page
    for wide, narrow in zip(check_page(page).values(), check_narrow_page(page), strict=True):
        assert float(narrow.get("width").removesuffix("pt")) == pytest.approx(3.35 * 72)
        assert figure_text(narrow)[-1] == figure_text(wide)[-1]
    curves, narrow_curves = next(iter(check_page(page).values())), check_narrow_page(page)[0]
    heights = [float(figure.get("height").removesuffix("pt")) / float(figure.get("width").removesuffix("pt"))
               for figure in (curves, narrow_curves)]
    assert heights[0] < 0.5
    assert heights[1] > 1.4, "two panels below each other"


def test_points_of_curves(tmp_path):
    """At most 300 points, gaps for missing and huge values, and none for zeros on a logarithmic axis."""
    losses: list[float | None] = [None if 2000 <= step < 3000 else 1 + step / 5000 for step in range(5000)]
    long, = load_runs([write_steps(tmp_path / "long", losses)])
    line = drawn(report_figures([long])[0].panels[0]).lines[0]
    x, y = line.get_xdata(), np.asarray(line.get_ydata())
    assert len(x) == 300
    assert np.flatnonzero(np.isnan(y)).tolist() == list(range(120, 180)), "one gap"
    assert y[0] == pytest.approx(1 + 7.5 / 5000, abs=1e-4), "the mean over neighboring steps"

    short, = load_runs([write_steps(tmp_path / "short", [0.0, 1.0, 1e200, None, 100.0, 10000.0])])
    norm = next(panel for panel in report_figures([short])[1].panels if panel.y_label.startswith("gradient norm"))
    axes = drawn(norm)
    assert axes.get_yscale() == "log"
    np.testing.assert_equal(axes.lines[0].get_ydata(), [math.nan, 1, math.nan, math.nan, 100, 10000])
    np.testing.assert_equal(drawn(report_figures([short])[0].panels[0]).lines[0].get_ydata()[:2], [0, 1])


def test_throughput_without_first_and_last_steps_and_without_token_counts(tmp_path):
    run, = load_runs([make_run(tmp_path / "a")])
    curves, _, _ = report_figures([run])
    tokens = drawn(curves.panels[1]).lines[0].get_xdata()
    assert (tokens[0], tokens[-1]) == (11 * 2048, 99 * 2048)
    path = make_run(tmp_path / "b", range(1, 2))
    (path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 2.5, "step_time_s": 0.25}}\n'
                                                for step in range(1, 20)))
    curves, details = report_figures(load_runs([path]))
    assert [(panel.x_label, panel.y_label) for panel in curves.panels] == [
        ("step", "loss (nats/token)"), ("step", "step time (ms)")]
    assert set(drawn(curves.panels[1]).lines[0].get_ydata()) == {250.0}
    assert [panel.x_label for panel in details.panels] == ["hours in steps"], "metrics that exist"


def test_runs_without_finite_losses_and_with_one_step_have_a_page(tmp_path):
    for name, losses in (("none", [None] * 9), ("one", [4.0]), ("huge", [1.7e308, -1.7e308, 5e-324, 1e99])):
        check_page(report_page(load_runs([write_steps(tmp_path / name, losses)])))


@pytest.mark.parametrize("name", [
    '<script>alert("1")&', "a$\\frac{$_b", "_hidden", "left\u202etfel", "\ufffe\U0001f600中", "long" * 50])
def test_hostile_names_are_escaped_in_page_and_figures(tmp_path, name):
    config = {"model": f"{name} \ud800 \x1b[31mred"}
    folders = [make_run(tmp_path / folder, range(1, 5), config=config) for folder in (name, "b")]
    page = report_page(load_runs(folders))
    curves, *_ = check_page(page).values()
    assert len([text for text in figure_text(curves) if text == "b"]) == 1
    assert len(curves.findall(".//*[@id='legend_1']//{http://www.w3.org/2000/svg}text")) == 2, "each run has a name"
    assert "<script" not in page
    assert not {"\u202e", "\ud800", "\x1b"} & set(page)
    assert r"\ud800 red" in page
    assert page.encode()


def test_files_of_figures_are_reproducible(tmp_path, capsys):
    runs = [str(make_run(tmp_path / "a")), str(make_run(tmp_path / "b", range(1, 41), lr=0.3))]
    assert main([*runs, "--figures", str(tmp_path / "figures")]) == 0
    written = [tmp_path / "figures" / f"{name}.{form}" for name in ("curves", "details", "breakdown")
               for form in ("pdf", "svg", "png")]
    assert "figures: " + ", ".join(map(str, written)) in capsys.readouterr().out
    assert written[0].read_bytes().startswith(b"%PDF")
    assert b"/Type3" not in written[0].read_bytes()
    assert xml.parse(written[1]).getroot().get("width") == f"{6.9 * 72:g}pt"
    assert written[2].read_bytes()[16:20] == int(6.9 * 300).to_bytes(4, "big")  # width in a PNG's header
    subprocess.run([sys.executable, "-m", "ezpz_llm.report", *runs, "--figures", str(tmp_path / "again")],
                   capture_output=True, timeout=scaled(60), check=True)
    assert all(path.read_bytes() == (tmp_path / "again" / path.name).read_bytes() for path in written)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        main([*runs, "--figures", str(tmp_path / "file")])


def test_bars_omit_negative_and_non_finite_parts():
    bars = bars_figure("bars", "t", [("a", {"x": 1.0, "y": math.nan, "z": -1.0}), ("b", {"z": 2.0})], "ms", 1e3)
    lengths = [[bar.get_width() for bar in container] for container in drawn(bars.panels[0]).containers]
    assert lengths == [[1000, 0], [0, 0], [0, 2000]]
    nothing = Figure("empty", "t", bars_figure("empty", "t", [("a", {"b": 0.0})], "s").panels)
    assert render(nothing, 3.35, ["svg"]), "bars of zero length"


@pytest.mark.parametrize("option", ["--html", "--figures"])
@pytest.mark.parametrize("command", ["report", "explain"])
def test_missing_matplotlib_is_reported_before_any_work(tmp_path, command, option):
    code = WITHOUT_MATPLOTLIB.format(f"ezpz_llm.{command}")
    run = subprocess.run([sys.executable, "-c", code, "nowhere", option, "out"], cwd=tmp_path, capture_output=True,
                         text=True, timeout=scaled(60), check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (f"error: a figure requires matplotlib, which is not installed\n  where:   {option}\n"
                          "  instead: pip install 'ezpz_llm[figures]'\n")


def test_text_report_needs_no_matplotlib(tmp_path):
    path = make_run(tmp_path / "a")
    program = WITHOUT_MATPLOTLIB.format("ezpz_llm.training.report.command")
    run = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True,
                         timeout=scaled(60), check=False)
    assert run.returncode == 0, run.stderr
    assert "validation (nats/token)" in run.stdout
