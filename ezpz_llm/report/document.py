"""A report as one HTML page."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from ezpz_llm.observe.history import steady
from ezpz_llm.observe.progress import short_number
from ezpz_llm.report.charts import Axis, Series, bars, chart, table
from ezpz_llm.report.compare import differences, verdict
from ezpz_llm.report.page import page, views
from ezpz_llm.report.results import RESULTS, SETTINGS, comments, phase_seconds, result_row, setting_row
from ezpz_llm.report.runs import Run
from ezpz_llm.rundir.secrets import redact_words

X = Callable[[Run], Sequence[float]]

_SHOWN = 6  # settings that differ; more are folded away
_LOSS = Axis("nats a token", lambda value: f"{value:.4g}")


def report_page(runs: Sequence[Run], now: float | None = None) -> str:
    """The page for one or several runs, of which at least one has steps."""
    drawn = [run for run in runs if len(run.rows)]
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"
    written = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    results = table("The loss is the mean over the last tenth of the steps, at most 50; times and rates are "
                    "medians over the steady steps", RESULTS, [result_row(run) for run in runs])
    sections = [("Results", results + _notes(runs))]
    if len(runs) > 1:
        sections.append(("What differs", _differences(runs)))
    sections += [("Loss", views("loss", "Loss over", _loss_views(drawn))),
                 ("Throughput", views("speed", "Show", _speed_views(drawn)))]
    phases = [(run.name, seconds) for run in drawn if (seconds := phase_seconds(run))]
    if phases:
        sections.append(("Where the step time goes", bars(
            "Mean of a steady step on rank 0 (communication is inside backward and optimizer)",
            phases, "ms", lambda value: f"{value * 1e3:.1f}")))
    sections += [("Optimizer", views("optimizer", "Show", _optimizer_views(drawn))),
                 ("Settings", table("What ran", SETTINGS, [setting_row(run) for run in runs]) + _commands(runs))]
    return page(title, f'<p class="faint">Written {escape(written)} by <code>ezpz-llm report</code>.</p>', sections)


def _loss_views(runs: Sequence[Run]) -> list[tuple[str, str]]:
    over: list[tuple[str, str, X]] = [("tokens", "tokens", lambda run: run.tokens),
                                      ("steps", "step", lambda run: run.column("step")),
                                      ("hours of training", "hours in steps", lambda run: run.hours)]
    panels = [(name, chart("Training loss, and validation loss as dots", Axis(label), _LOSS,
                           _loss_series(runs, x, begin=0))) for name, label, x in over]
    half = max(run.tokens[-1] for run in runs) / 2
    late = _loss_series(runs, lambda run: run.tokens, begin=half)
    if any(len(one.x) for one in late):
        panels.append(("tokens, second half", chart("Training loss, and validation loss as dots, from half of the "
                                                    "longest run on", Axis("tokens"), _LOSS, late)))
    return panels


def _loss_series(runs: Sequence[Run], x: X, begin: float) -> list[Series]:
    """Loss and validation of each run, where x is at least `begin`."""
    series = []
    for number, run in enumerate(runs):
        part = x(run) >= begin
        evaluated = part & np.isfinite(run.column("val_loss"))
        name = run.name if len(runs) > 1 else "training"
        series.append(Series(name, x(run)[part], run.column("loss")[part], number))
        if evaluated.any():
            series.append(Series(f"{run.name}, validation" if len(runs) > 1 else "validation", x(run)[evaluated],
                                 run.column("val_loss")[evaluated], number if len(runs) > 1 else 1, dots=True))
    return series


def _speed_views(runs: Sequence[Run]) -> list[tuple[str, str]]:
    shown = [("tokens/s", "tokens_per_second", Axis("tokens/s", short_number), 1.0),
             ("tokens/s a device", "tokens_per_second_per_device", Axis("tokens/s a device", short_number), 1.0),
             ("step time", "step_time_s", Axis("ms", lambda value: f"{value:.4g}"), 1e3),
             ("MFU", "mfu", Axis("of the stated peak", lambda value: f"{value:.3g} %"), 100.0)]
    panels = []
    for name, metric, axis, scale in shown:
        series = [Series(run.name, steady(run.column("step")),
                         steady(run.column(metric)) * scale, number)
                  for number, run in enumerate(runs)]
        if metric != "mfu" or any(np.isfinite(one.y).any() for one in series):
            panels.append((name, chart(f"{name}, without the first and last steps", Axis("step"), axis, series,
                                       np.median)))
    return panels


def _optimizer_views(runs: Sequence[Run]) -> list[tuple[str, str]]:
    def over_steps(metric: str) -> list[Series]:
        return [Series(run.name, run.column("step"), run.column(metric), number) for number, run in enumerate(runs)]

    norm = Axis("norm, logarithmic", lambda value: f"{value:.3g}", log=True)
    return [("gradient norm", chart("Gradient norm before clipping, the largest of neighbouring steps",
                                    Axis("step"), norm, over_steps("grad_norm"), max)),
            ("learning rate", chart("Learning rate", Axis("step"), Axis("rate", lambda value: f"{value:.3g}"),
                                    over_steps("lr")))]


def _notes(runs: Sequence[Run]) -> str:
    said = "".join(f"<li>{escape(f'{name}: {text}' if len(runs) > 1 else text)}</li>"
                   for name, text in comments(runs))
    return f"<ul>{said}</ul>"


def _differences(runs: Sequence[Run]) -> str:
    found = differences(runs)
    kind = ' class="warning"' if len(found) > 1 else ""
    text = f"<p{kind}>{escape(verdict(found))}</p>"
    if found:
        rows = [[name, *values] for name, values in found.items()]
        text += (f"<details{' open' if len(found) <= _SHOWN else ''}><summary>Settings that differ</summary>"
                 f"{table('By run', ['setting', *(run.name for run in runs)], rows)}</details>")
    return text


def _commands(runs: Sequence[Run]) -> str:
    said = ""
    for run in runs:
        words = (run.record.get("launch") or {}).get("typed")
        command = f"<br><code>{escape(shlex.join(redact_words(words)))}</code>" if words else ""
        said += f"<li>{escape(str(run.path))}{command}</li>"
    return f"<ul>{said}</ul>"
