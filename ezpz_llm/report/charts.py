"""Line charts as HTML with SVG inside: lines stretch with the page while letters keep their size.

The drawing area is an SVG of 1000 x 1000 units that is stretched to whatever place there is; ticks and names are
text beside it. A chart says what it shows in words and has its numbers in a table, so that none of it needs eyes or
a script; `page.js` adds a cursor that reads values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from ezpz_llm.observe.plots import Reduce, Values, downsample, round_ticks
from ezpz_llm.observe.throughput import short_number

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
