"""A report as one HTML page, with line charts in SVG: lines stretch with the page while letters keep their size.

The drawing area is an SVG of 1000 x 1000 units that is stretched to whatever place there is; ticks and names are
text beside it. A chart says what it shows in words and has its numbers in a table, so that none of it needs eyes or
a script; `page.js` adds a cursor that reads values.
"""

from __future__ import annotations

import hashlib
import math
import shlex
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from ezpz_llm.observe.history import steady
from ezpz_llm.observe.plots import Reduce, Values, downsample, round_ticks
from ezpz_llm.observe.throughput import short_number
from ezpz_llm.report.runs import (
    RESULTS,
    SETTINGS,
    Run,
    comments,
    differences,
    phase_seconds,
    result_row,
    setting_row,
    verdict,
)
from ezpz_llm.rundir.secrets import redact_words

_UNITS = 1000
_POINTS = 300
"""Points of a line: about what a wide screen can show, and 4 kB."""
_TABLE_ROWS = 8

Form = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """One series. Values of None or NaN leave a gap; `number` chooses colour and dashes; `dots` are not joined."""

    name: str
    x: Sequence[float] | np.ndarray
    y: Values
    number: int
    dots: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis of a chart. On a logarithmic one, values that are not positive are left out."""

    label: str
    form: Form = short_number
    log: bool = False


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series], reduce: Reduce = np.mean) -> str:
    """A figure with a title, a key, the drawing, and a table of some of its numbers.

    Args:
        reduce: makes one value of neighbouring ones where a series is longer than can be drawn.
    """
    drawn = [one for one in (_thinned(one, y.log, reduce) for one in series) if one.x]
    if not drawn:
        return f'<figure><figcaption>{escape(title)}</figcaption><p class="empty">Nothing to draw yet.</p></figure>'
    x_scale = _Scale.around([value for one in drawn for value in one.x], x.log, margin=0)
    y_scale = _Scale.around([value for one in drawn for value in one.y if value is not None], y.log, margin=0.04)
    key = "".join(f'<li class="s{one.number % 8}">{_swatch(one)}{escape(one.name)}</li>' for one in drawn)
    says = "; ".join(_in_words(one, y.form) for one in drawn)
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><ul class="key">{key}</ul>'
        f'<div class="chart"><div class="unit">{escape(y.label)}</div>'
        f'<div class="ticks y">{_ticks(y_scale, y.form, "bottom")}</div>'
        f'<div class="plot" data-x="{x_scale}" data-y="{y_scale}" data-label="{escape(x.label)}">'
        f'<svg viewBox="0 0 {_UNITS} {_UNITS}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}. {escape(says)}.">{_grid(x_scale, y_scale)}'
        f'{"".join(_path(one, x_scale, y_scale) for one in drawn)}</svg></div>'
        f'<div class="ticks x">{_ticks(x_scale, x.form, "left")}</div>'
        f'<div class="unit x">{escape(x.label)}</div></div>'
        f'<output aria-live="polite"></output>{_numbers(title, x, y, drawn)}</figure>')


@dataclass(frozen=True)
class _Scale:
    """From values to units along an axis, linear or logarithmic."""

    low: float
    high: float
    log: bool

    @staticmethod
    def around(values: Sequence[float], log: bool, margin: float) -> _Scale:
        """A scale that spans the values and a margin on both sides."""
        low, high = min(values), max(values)
        if low == high:  # a single value stands in the middle
            low, high = (low / 2, high * 2) if log else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)
        if log:
            more = (high / low) ** margin
            return _Scale(low / more, high * more, True)
        return _Scale(low - margin * (high - low), high + margin * (high - low), False)

    def __call__(self, value: float) -> float:
        if self.log:
            return _UNITS * math.log(value / self.low) / math.log(self.high / self.low)
        return _UNITS * (value - self.low) / (self.high - self.low)

    def __str__(self) -> str:
        return f"{self.low:.8g} {self.high:.8g} {'log' if self.log else 'linear'}"

    def ticks(self) -> list[float]:
        """Round numbers within the scale."""
        if not self.log or self.high < 4 * self.low:
            return round_ticks(self.low, self.high)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1, 2, 5), (1, 3), (1,)):
            found = [step * 10.0**power for power in decades for step in steps]
            found = [tick for tick in found if self.low <= tick <= self.high]
            if len(found) <= 8:
                return found
        return found[:: math.ceil(len(found) / 8)]


def _thinned(one: Series, log: bool, reduce: Reduce) -> Series:
    x, y = np.asarray(one.x, float), np.asarray(one.y, float)
    usable = np.isfinite(y) & (y > 0) if log else np.isfinite(y)
    there = np.flatnonzero(usable)
    part = slice(there[0], there[-1] + 1) if len(there) else slice(0)

    def reduced(values: np.ndarray) -> float:
        values = values[np.isfinite(values)]
        return reduce(values) if len(values) else math.nan

    at, values = downsample(x[part], np.where(usable, y, math.nan)[part], _POINTS, reduced)
    return Series(one.name, at, [None if math.isnan(value) else value for value in values], one.number, one.dots)


def _path(one: Series, x: _Scale, y: _Scale) -> str:
    steps, pen_is_down = [], False
    for a, b in zip(one.x, one.y, strict=True):
        if b is None:
            pen_is_down = False
            continue
        at = f"{x(a):.1f} {_UNITS - y(b):.2f}"
        # A line of no length draws its round ends alone: a dot.
        steps.append(f"M{at}h0" if one.dots else f"{'L' if pen_is_down else 'M'}{at}")
        pen_is_down = True
    kind = "dots" if one.dots else f"line d{_dashes(one)}"
    return f'<path class="s{one.number % 8} {kind}" data-name="{escape(one.name)}" d="{"".join(steps)}"/>'


def _dashes(one: Series) -> int:
    # Shifted with each round of colours, so that no two of 32 series look alike.
    return (one.number + one.number // 8) % 4


def _swatch(one: Series) -> str:
    kind = "dots" if one.dots else f"line d{_dashes(one)}"
    d = "M12 5h0" if one.dots else "M0 5h24"
    return f'<svg class="swatch" viewBox="0 0 24 10" aria-hidden="true"><path class="{kind}" d="{d}"/></svg>'


def _grid(x: _Scale, y: _Scale) -> str:
    lines = [f"M{x(tick):.1f} 0v{_UNITS}" for tick in x.ticks()]
    lines += [f"M0 {_UNITS - y(tick):.1f}h{_UNITS}" for tick in y.ticks()]
    return f'<path class="grid" d="{"".join(lines)}"/>'


def _ticks(scale: _Scale, form: Form, side: str) -> str:
    return "".join(f'<span style="{side}:{scale(tick) / _UNITS:.2%}">{escape(form(tick))}</span>'
                   for tick in scale.ticks())


def _in_words(one: Series, form: Form) -> str:
    values = [value for value in one.y if value is not None]
    return (f"{one.name}: {form(values[0])} at first, {form(values[-1])} at the end, "
            f"between {form(min(values))} and {form(max(values))}")


def _numbers(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    low, high = min(one.x[0] for one in series), max(one.x[-1] for one in series)
    places = [low + (high - low) * i / (_TABLE_ROWS - 1) for i in range(_TABLE_ROWS)] if high > low else [low]
    rows = [[x.form(place), *(_near(one, place, (high - low) / (_TABLE_ROWS - 1), y.form) for one in series)]
            for place in places]
    return (f"<details><summary>Numbers</summary>"
            f"{table(f'{title} ({y.label})', [x.label, *(one.name for one in series)], rows)}</details>")


def _near(one: Series, place: float, reach: float, form: Form) -> str:
    known = [(abs(a - place), b) for a, b in zip(one.x, one.y, strict=True) if b is not None]
    distance, value = min(known)
    return form(value) if distance <= reach / 2 else "-"


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column names the rows; it scrolls by itself where it is wider than the page."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(f'<tr><th scope="row">{escape(row[0])}</th>'
                   + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>" for row in rows)
    return (f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
            f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>")


def bars(title: str, rows: Sequence[tuple[str, dict[str, float]]], unit: str, form: Form) -> str:
    """Stacked bars, one a row, each part with its name; all on the scale of the longest."""
    longest = max(sum(parts.values()) for _, parts in rows)
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    key = "".join(f'<li class="s{i % 8}"><svg class="swatch" viewBox="0 0 24 10" aria-hidden="true">'
                  f'<rect width="24" height="10"/></svg>{escape(name)}</li>' for i, name in enumerate(names))
    drawn = "".join(
        f'<dt>{escape(row)}</dt><dd aria-hidden="true">' + "".join(
            f'<i class="s{names.index(name) % 8}" style="width:{value / longest:.2%}"></i>'
            for name, value in parts.items()) + "</dd>" for row, parts in rows)
    numbers = [[row, *(form(parts[name]) if name in parts else "-" for name in names), form(sum(parts.values()))]
               for row, parts in rows]
    return (f'<figure><figcaption>{escape(title)}</figcaption><ul class="key">{key}</ul>'
            f'<dl class="bars">{drawn}</dl>'
            f"{table(f'{title} ({unit})', ['', *names, 'sum'], numbers)}</figure>")


# One HTML page that needs nothing besides itself: no network, no server; light or dark, narrow or wide.
_HERE = Path(__file__).parent


def page(title: str, intro: str, sections: Sequence[tuple[str, str]]) -> str:
    """The page. `intro` and the sections' bodies are HTML, the title and their headings are text.

    The browser is told to load nothing from anywhere and to run no script but the one that is named by its hash, so
    a mistake in a body could not either.
    """
    style = "\n" + (_HERE / "page.css").read_text(encoding="utf-8")
    script = "\n" + (_HERE / "page.js").read_text(encoding="utf-8")
    # Attributes may say where a tick stands; of elements only ours has a say, in browsers that tell them apart.
    allowed = (f"default-src 'none'; script-src {_hash(script)}; style-src 'unsafe-inline'; "
               f"style-src-elem {_hash(style)}; base-uri 'none'; form-action 'none'")
    body = "".join(f"<section><h2>{escape(heading)}</h2>{text}</section>\n" for heading, text in sections)
    return (
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
    """The line that says when a page was written, and by what; `now` in epoch seconds."""
    written = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    return f'<p class="faint">Written {escape(written)} by <code>{command}</code>.</p>'


def items(sentences: Iterable[str]) -> str:
    """A list of sentences; empty without any."""
    text = "".join(f"<li>{escape(one)}</li>" for one in sentences)
    return f"<ul>{text}</ul>" if text else ""


def views(name: str, legend: str, panels: Sequence[tuple[str, str]]) -> str:
    """Several bodies of which one is shown, chosen by radio buttons (without a script).

    Args:
        name: of the group of buttons, unique on the page.
    """
    if len(panels) == 1:
        return panels[0][1]
    buttons = "".join(
        f'<input type="radio" name="{escape(name)}" id="{escape(name)}{i}"{" checked" if i == 0 else ""}>'
        f'<label for="{escape(name)}{i}">{escape(label)}</label>' for i, (label, _) in enumerate(panels))
    return (f'<fieldset class="views"><legend>{escape(legend)}</legend>{buttons}'
            + "".join(f'<div class="panel">{body}</div>' for _, body in panels) + "</fieldset>")


X = Callable[[Run], np.ndarray]

_SHOWN = 6  # settings that differ; more are folded away
_LOSS = Axis("nats a token", lambda value: f"{value:.4g}")


def report_page(runs: Sequence[Run], now: float | None = None) -> str:
    """The page for one or several runs, of which at least one has steps."""
    drawn = [run for run in runs if len(run.rows)]
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"
    results = table("The loss is the mean over the last tenth of the steps, at most 50; times and rates are "
                    "medians over the steady steps", RESULTS, [result_row(run) for run in runs])
    notes = items(f"{name}: {text}" if len(runs) > 1 else text for name, text in comments(runs))
    sections = [("Results", results + notes)]
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
    return page(title, written_by("ezpz-llm report", now), sections)


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
        if metric != "mfu" or any(np.isfinite(np.asarray(one.y, float)).any() for one in series):
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
