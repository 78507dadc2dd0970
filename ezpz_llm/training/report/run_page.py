"""HTML page and figures of runs: loss, throughput, step-time breakdown, gradient norm, and learning rate."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ezpz_llm.core.base import UserError, print_lines, require_package
from ezpz_llm.core.rundir import RunDir, redact_words, write_atomic
from ezpz_llm.core.rundir.records import Launch
from ezpz_llm.training.observe.history import History, steady_steps
from ezpz_llm.training.observe.plots import downsample
from ezpz_llm.training.observe.tables import Table
from ezpz_llm.training.observe.throughput import format_number
from ezpz_llm.training.report.document import Part, page
from ezpz_llm.training.report.figures import (
    COLORS,
    DASHES,
    MARKERS,
    MAX_VALUE,
    Figure,
    Panel,
    bars_figure,
    name_text,
)
from ezpz_llm.training.report.runs import (
    RESULTS,
    SETTINGS,
    Run,
    comparison_sentence,
    differences,
    phase_seconds,
    remarks,
    result_row,
    run_of,
    setting_row,
)

_POINTS = 300
"""Maximum number of points of a curve."""


def write_own_page(run_dir: RunDir, history: History) -> None:
    """Write report.html of the run that this process has just finished, or print what to install for it."""
    try:
        require_package("matplotlib", run_dir.report.name, "figures")
    except UserError as error:
        print_lines(f"note: {error.found}: {error.instead}")
    else:
        write_atomic(run_dir.report, report_page([run_of(run_dir, history)]))


def report_page(runs: Sequence[Run], now: float | None = None) -> str:
    """Return the HTML page of one or more runs, at least one of which has steps.

    Args:
        now: time in epoch seconds.

    Raises:
        UserError: matplotlib cannot be imported.
    """
    notes = [f"{name}: {text}" if len(runs) > 1 else text for name, text in remarks(runs)]
    results = _table("The loss is the mean over the last tenth of the steps, at most 50; times and throughput are "
                     "medians over the steady steps", RESULTS, map(result_row, runs), notes)
    sections: list[tuple[str, Sequence[Part]]] = [("Results", [results])]
    if len(runs) > 1:
        differing = differences(runs)
        rows = ([name, *values] for name, values in differing.items())
        settings = _table("Settings that differ", ["setting", *(run.name for run in runs)], rows)
        sections.append(("Differences", [comparison_sentence(differing), *([settings] if differing else [])]))
    commands = ([str(run.path), shlex.join(redact_words((run.record.launch or Launch()).typed or []))]
                for run in runs)
    sections += [("Curves", report_figures(runs)),
                 ("Settings", [_table("Settings of the runs", SETTINGS, map(setting_row, runs)),
                               _table("Commands", ("run directory", "command"), commands)])]
    return page(f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs", "ezpz-llm report", sections, now)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str] = ()) -> Table:
    return Table(title, tuple(columns), tuple(map(tuple, rows)), tuple(notes))


@dataclass(frozen=True)
class _Axis:
    """Horizontal axis of curves."""

    label: str
    values: Callable[[Run], Any]


_TOKENS = _Axis("tokens", lambda run: run.tokens)
_STEPS = _Axis("step", lambda run: run.column("step"))
_HOURS = _Axis("hours in steps", lambda run: run.hours)


@dataclass(frozen=True)
class _Curves:
    """Curves of a metric, one for each run.

    Attributes:
        scale: factor from the metric to the unit of the label.
        reduce: function that combines neighboring values of a run with too many steps.
        is_timing: omit the first and last steps, which would dominate the scale.
        begin: lowest position to draw.
    """

    metric: str
    label: str
    axis: _Axis
    scale: float = 1.0
    reduce: Callable[[Sequence[float]], float] = statistics.fmean
    is_timing: bool = False
    is_log: bool = False
    begin: float = 0.0

    def panel(self, runs: Sequence[Run]) -> Panel:
        """Return the panel of these curves."""
        return Panel(lambda axes: self._draw(axes, runs), self.axis.label, self.label)

    def points(self, run: Run, metric: str) -> tuple[Any, Any]:
        """Return arrays of positions and values; NaN where a value is missing, or the axis cannot show it."""
        x, y = (np.asarray(steady_steps(values) if self.is_timing else values, float)
                for values in (self.axis.values(run), run.column(metric)))
        drawable = (np.abs(y) < MAX_VALUE) & ((y > 1 / MAX_VALUE) | (not self.is_log))
        y = np.where(drawable, self.scale * y, math.nan)
        return x[x >= self.begin], y[x >= self.begin]

    def _draw(self, axes: Any, runs: Sequence[Run]) -> None:
        several = len(runs) > 1
        for i, run in enumerate(runs):
            name = name_text(run.name) if several else "training"
            x, y = self.points(run, self.metric)
            axes.plot(*downsample(x, y, _POINTS, self._reduce_finite), label=name,
                      color=COLORS[i % len(COLORS)], linestyle=DASHES[(i + i // len(COLORS)) % len(DASHES)])
            if self.metric == "loss" and run.validation:
                x, y = self.points(run, "val_loss")
                evaluated = np.isfinite(y)
                axes.plot(*downsample(x[evaluated], y[evaluated], _POINTS), linestyle="",
                          label=f"{name}, validation" if several else "validation",
                          color=COLORS[i % len(COLORS) if several else 1], marker=MARKERS[i % len(MARKERS)])
        if self.axis is _TOKENS:
            axes.xaxis.set_major_formatter(lambda value, _: format_number(value))
        if self.is_timing:
            axes.yaxis.set_major_formatter(lambda value, _: format_number(value))
            axes.set_ylim(bottom=0)
        if self.is_log:
            from matplotlib.ticker import LogFormatter

            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(LogFormatter())
            axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))

    def _reduce_finite(self, values: Any) -> float:
        finite = [value for value in values if math.isfinite(value)]
        return self.reduce(finite) if finite else math.nan


def report_figures(runs: Sequence[Run]) -> list[Figure]:
    """Return the figures of runs, at least one of which has steps."""
    runs = [run for run in runs if len(run.rows)]
    longest = max(run.tokens[-1] for run in runs)
    axis = _TOKENS if longest > 0 else _STEPS

    def timing(metric: str, label: str, scale: float = 1.0) -> _Curves:
        """Return the curves of a metric of the steady steps."""
        return _Curves(metric, label, axis, scale, statistics.median, is_timing=True)

    loss = _Curves("loss", "loss (nats/token)", axis)
    # Step time is the reciprocal of tokens/s, so it is shown only without token counts.
    speed = timing("tokens_per_second", "tokens/s") if longest > 0 else timing("step_time_s", "step time (ms)", 1e3)
    details = [*([replace(loss, begin=longest / 2), replace(loss, axis=_STEPS)] if longest > 0 else []),
               replace(loss, axis=_HOURS),
               timing("tokens_per_second_per_device", "tokens/s per device"),
               timing("mfu", "MFU (% of the vendor's peak)", 100),
               _Curves("grad_norm", "gradient norm before clipping", _STEPS, reduce=max, is_log=True),
               _Curves("lr", "learning rate", _STEPS)]
    details = [curves for curves in details
               if any(np.isfinite(curves.points(run, curves.metric)[1]).any() for run in runs)]
    figures = [Figure("curves", "Loss, and throughput without the first and last steps",
                      (loss.panel(runs), speed.panel(runs)))]
    if details:
        figures.append(Figure("details", "Loss over other axes, throughput per device, and optimizer",
                              tuple(curves.panel(runs) for curves in details)))
    phases = [(run.name, seconds) for run in runs if (seconds := phase_seconds(run))]
    if phases:
        figures.append(bars_figure("breakdown", "Mean of a steady step on rank 0 (communication is inside backward "
                                   "and optimizer)", phases, "ms", 1e3))
    return figures
