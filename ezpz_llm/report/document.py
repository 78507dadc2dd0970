"""Report as a self-contained HTML page, with light and dark themes, for wide and narrow screens."""

from __future__ import annotations

import hashlib
import shlex
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from ezpz_llm.base import escape_control_characters
from ezpz_llm.observe.history import steady_steps
from ezpz_llm.observe.tables import Table
from ezpz_llm.observe.throughput import format_number
from ezpz_llm.report.chart import Axis, Series, bars, chart, table
from ezpz_llm.report.runs import (
    RESULTS,
    SETTINGS,
    Run,
    comparison_sentence,
    differences,
    phase_seconds,
    remarks,
    result_row,
    setting_row,
)
from ezpz_llm.rundir import redact_words

_HERE = Path(__file__).parent


def page(title: str, intro: str, sections: Sequence[tuple[str, str]]) -> str:
    """Return the page. `intro` and the sections' bodies are HTML; the title and the headings are text.

    The content security policy forbids external resources and all scripts except the page's own, identified by its
    hash, so that unescaped text in a body cannot run code. Invisible characters, and those that change the
    direction of text, are shown as escapes.
    """
    style = "\n" + (_HERE / "page.css").read_text(encoding="utf-8")
    script = "\n" + (_HERE / "page.js").read_text(encoding="utf-8")
    # Style attributes position the ticks. Browsers that support style-src-elem allow only this style element.
    allowed = (f"default-src 'none'; script-src {_hash(script)}; style-src 'unsafe-inline'; "
               f"style-src-elem {_hash(style)}; base-uri 'none'; form-action 'none'")
    body = "".join(f"<section><h2>{escape(heading)}</h2>{text}</section>\n" for heading, text in sections)
    return escape_control_characters(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{escape(title)}</h1>\n{intro}\n{body}</main>\n<script>{script}</script>\n"
        "</body>\n</html>\n")


def _hash(text: str) -> str:
    """Return the CSP hash source of an element's text."""
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def written_by(command: str, now: float | None = None) -> str:
    """Return the line with the time and command that wrote the page. `now` is in epoch seconds."""
    written = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    return f'<p class="faint">Written {escape(written)} by <code>{command}</code>.</p>'


def items(sentences: Iterable[str]) -> str:
    """Return an HTML list of sentences, or an empty string if there are none."""
    text = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{text}</ul>" if text else ""


def table_of(content: Table) -> str:
    """Return a table with its notes as HTML."""
    rendered = table(content.title, content.columns, content.rows, content.footer) if content.columns else ""
    return rendered + items(content.notes)


def views(name: str, legend: str, panels: Sequence[tuple[str, str]]) -> str:
    """Return panels and radio buttons that select the visible one, without a script.

    Args:
        name: name of the group of buttons, unique on the page.
    """
    if len(panels) == 1:
        return panels[0][1]
    buttons = "".join(
        f'<input type="radio" name="{escape(name)}" id="{escape(name)}{i}"{" checked" if i == 0 else ""}>'
        f'<label for="{escape(name)}{i}">{escape(label)}</label>' for i, (label, _) in enumerate(panels))
    return (f'<fieldset class="views"><legend>{escape(legend)}</legend>{buttons}'
            + "".join(f'<div class="panel">{body}</div>' for _, body in panels) + "</fieldset>")


X = Callable[[Run], Sequence[float]]

_SHOWN = 6  # differing settings; more are collapsed
_LOSS = Axis("nats/token", lambda value: f"{value:.4g}")


def report_page(runs: Sequence[Run], now: float | None = None) -> str:
    """Return the page for one or more runs, at least one of which has steps."""
    drawn = [run for run in runs if len(run.rows)]
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"
    results = table("The loss is the mean over the last tenth of the steps, at most 50; times and throughput are "
                    "medians over the steady steps", RESULTS, [result_row(run) for run in runs])
    notes = items(f"{name}: {text}" if len(runs) > 1 else text for name, text in remarks(runs))
    sections = [("Results", results + notes)]
    if len(runs) > 1:
        sections.append(("Differences", _differences(runs)))
    sections += [("Loss", views("loss", "Loss over", _loss_views(drawn))),
                 *([("Throughput", views("speed", "Show", speeds))] if (speeds := _speed_views(drawn)) else [])]
    phases = [(run.name, seconds) for run in drawn if (seconds := phase_seconds(run))]
    if phases:
        sections.append(("Step-time breakdown", bars(
            "Mean of a steady step on rank 0 (communication is inside backward and optimizer)",
            phases, "ms", lambda value: f"{value * 1e3:.1f}")))
    sections += [("Optimizer", views("optimizer", "Show", _optimizer_views(drawn))),
                 ("Settings", table("Settings of the runs", SETTINGS, [setting_row(run) for run in runs])
                  + _commands(runs))]
    return page(title, written_by("ezpz-llm report", now), sections)


def _loss_views(runs: Sequence[Run]) -> list[tuple[str, str]]:
    has_tokens = any(run.tokens[-1] > 0 for run in runs)
    over: list[tuple[str, str, X]] = [*([("tokens", "tokens", lambda run: run.tokens)] if has_tokens else []),
                                      ("steps", "step", lambda run: run.column("step")),
                                      ("hours of training", "hours in steps", lambda run: run.hours)]
    panels = [(name, chart("Training loss, and validation loss as dots", Axis(label), _LOSS,
                           _loss_series(runs, x, begin=0))) for name, label, x in over]
    half = max(run.tokens[-1] for run in runs) / 2
    late = _loss_series(runs, lambda run: run.tokens, begin=half)
    if has_tokens and any(len(curve.x) for curve in late):
        panels.append(("tokens, second half", chart("Training loss, and validation loss as dots, in the second "
                                                    "half of the longest run", Axis("tokens"), _LOSS, late)))
    return panels


def _loss_series(runs: Sequence[Run], x: X, begin: float) -> list[Series]:
    """Return training and validation loss of each run, for x of at least `begin`."""
    series = []
    for number, run in enumerate(runs):
        at, validation = np.asarray(x(run)), np.asarray(run.column("val_loss"))
        part = at >= begin
        evaluated = part & np.isfinite(validation)
        name = run.name if len(runs) > 1 else "training"
        series.append(Series(name, at[part], np.asarray(run.column("loss"))[part], number))
        if evaluated.any():
            series.append(Series(f"{run.name}, validation" if len(runs) > 1 else "validation", at[evaluated],
                                 validation[evaluated], number if len(runs) > 1 else 1, dots=True))
    return series


def _speed_views(runs: Sequence[Run]) -> list[tuple[str, str]]:
    metrics = [("tokens/s", "tokens_per_second", Axis("tokens/s", format_number), 1.0),
               ("tokens/s per device", "tokens_per_second_per_device", Axis("tokens/s per device", format_number),
                1.0),
               # Step time is the reciprocal of tokens/s: show it only without token counts.
               *([] if _has_values(runs, "tokens_per_second") else
                 [("step time", "step_time_s", Axis("ms", lambda value: f"{value:.4g}"), 1e3)]),
               ("MFU", "mfu", Axis("of the vendor's peak", lambda value: f"{value:.3g} %"), 100.0)]
    panels = []
    for name, metric, axis, scale in metrics:
        series = [Series(run.name, steady_steps(run.column("step")),
                         np.asarray(steady_steps(run.column(metric))) * scale, number)
                  for number, run in enumerate(runs)]
        if _has_values(runs, metric):
            panels.append((name, chart(f"{name}, without the first and last steps", Axis("step"), axis, series,
                                       np.median)))
    return panels


def _has_values(runs: Sequence[Run], metric: str) -> bool:
    return any(run.rows.finite(metric) for run in runs)


def _optimizer_views(runs: Sequence[Run]) -> list[tuple[str, str]]:
    def over_steps(metric: str) -> list[Series]:
        return [Series(run.name, run.column("step"), run.column(metric), number) for number, run in enumerate(runs)]

    norm = Axis("gradient norm", lambda value: f"{value:.3g}", log=True)
    rate = Axis("learning rate", lambda value: f"{value:.3g}")
    return [("gradient norm", chart("Gradient norm before clipping, maximum over neighboring steps",
                                    Axis("step"), norm, over_steps("grad_norm"), max)),
            ("learning rate", chart("Learning rate", Axis("step"), rate, over_steps("lr")))]


def _differences(runs: Sequence[Run]) -> str:
    differing = differences(runs)
    kind = ' class="warning"' if len(differing) > 1 else ""
    text = f"<p{kind}>{escape(comparison_sentence(differing))}</p>"
    if differing:
        rows = [[name, *values] for name, values in differing.items()]
        text += (f"<details{' open' if len(differing) <= _SHOWN else ''}><summary>Settings that differ</summary>"
                 f"{table('By run', ['setting', *(run.name for run in runs)], rows)}</details>")
    return text


def _commands(runs: Sequence[Run]) -> str:
    entries = ""
    for run in runs:
        arguments = (run.record.get("launch") or {}).get("typed")
        command = f"<br><code>{escape(shlex.join(redact_words(arguments)))}</code>" if arguments else ""
        entries += f"<li>{escape(str(run.path))}{command}</li>"
    return f"<ul>{entries}</ul>"
