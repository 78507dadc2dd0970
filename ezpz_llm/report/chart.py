"""Charts, stacked bars and tables as HTML. Text keeps its size, while lines scale with the page.

The plot area is an SVG of 1000 x 1000 units stretched to the available space; ticks and names are HTML text around
it. For accessibility, and for browsers without scripts, each chart has a text description and a table of its
numbers. Each chart also contains its points and a second scale, logarithmic or linear, for the cursor and the
switches of `page.js`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from ezpz_llm.observe.plots import Reduce, Values, downsample, round_ticks
from ezpz_llm.observe.throughput import format_number

_UNITS = 1000
_POINTS = 300
"""Maximum number of points in a line: as many as a wide screen can show, in 9 kB."""
_TABLE_ROWS = 8

Form = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """Series of a chart.

    Attributes:
        y: values; None and NaN leave a gap.
        number: index that selects color and dashes.
        dots: draw unconnected dots.
    """

    name: str
    x: Sequence[float] | np.ndarray
    y: Values
    number: int
    dots: bool = False


@dataclass(frozen=True)
class Axis:
    """Axis of a chart.

    Attributes:
        log: use a logarithmic scale, which omits values that are not positive.
        marks: values for the ticks and for the rows of the table of numbers, instead of round numbers.
    """

    label: str
    form: Form = format_number
    log: bool = False
    marks: tuple[float, ...] = ()


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series], reduce: Reduce = np.mean) -> str:
    """Return an HTML figure with title, legend, plot, and a table of selected values.

    Args:
        reduce: function that combines neighboring values of a series with too many points.
    """
    drawn = [curve for curve in (_downsampled(given, y.log, reduce) for given in series) if curve.x]
    if not drawn:
        return f'<figure><figcaption>{escape(title)}</figcaption><p class="empty">No data yet.</p></figure>'
    x_scale = _Scale.around([value for curve in drawn for value in curve.x], x.log, margin=0, marks=x.marks)
    values = [value for curve in drawn for value in curve.y if value is not None]
    y_scale, second = _Scale.around(values, y.log, margin=0.04), _second_scale(values, y.log)
    key = "".join(f'<li class="s{curve.number % 8}">{_swatch(curve)}{escape(curve.name)}</li>' for curve in drawn)
    description = "; ".join(_describe(curve, y.form) for curve in drawn)
    more = (f'<div class="ticks y second">{_ticks(second, y.form, "bottom")}</div>', f' data-second="{second}"',
            _grid(x_scale, second, "grid second")) if second else ("", "", "")
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><ul class="key">{key}</ul>'
        f'<div class="chart"><div class="unit">{escape(y.label)}</div>'
        f'<div class="ticks y first">{_ticks(y_scale, y.form, "bottom")}</div>{more[0]}'
        f'<div class="plot" data-x="{x_scale}" data-y="{y_scale}"{more[1]} data-label="{escape(x.label)}" '
        f'data-unit="{escape(y.label)}">'
        f'<svg viewBox="0 0 {_UNITS} {_UNITS}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}. {escape(description)}.">{_grid(x_scale, y_scale, "grid first")}{more[2]}'
        f'{"".join(_path(curve, x_scale, y_scale) for curve in drawn)}</svg></div>'
        f'<div class="ticks x">{_ticks(x_scale, x.form, "left")}</div>'
        f'<div class="unit x">{escape(x.label)}</div></div>'
        f'<output aria-live="polite"></output>{_numbers_table(title, x, y, drawn)}</figure>')


def _second_scale(values: Sequence[float], is_log: bool) -> _Scale | None:
    """Return the alternative scale that a switch selects: logarithmic for a linear axis, and vice versa.

    Returns None if that scale cannot show any value.
    """
    fitting = values if is_log else [value for value in values if value > 0]
    return _Scale.around(fitting, not is_log, margin=0.04) if fitting else None


@dataclass(frozen=True)
class _Scale:
    """Linear or logarithmic mapping from values to units along an axis."""

    low: float
    high: float
    log: bool
    marks: tuple[float, ...] = ()

    @staticmethod
    def around(values: Sequence[float], log: bool, margin: float, marks: tuple[float, ...] = ()) -> _Scale:
        """Return a scale that spans the values and a margin on both sides."""
        low, high = min(values), max(values)
        if low == high:  # center a single value
            low, high = (low / 2, high * 2) if log else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)
        if log:
            more = (high / low) ** margin
            return _Scale(low / more, high * more, True, marks)
        return _Scale(low - margin * (high - low), high + margin * (high - low), False, marks)

    def __call__(self, value: float) -> float:
        if self.log:
            return _UNITS * math.log(value / self.low) / math.log(self.high / self.low)
        return _UNITS * (value - self.low) / (self.high - self.low)

    def __str__(self) -> str:
        return f"{self.low:.8g} {self.high:.8g} {'log' if self.log else 'linear'}"

    def ticks(self) -> list[float]:
        """Return the marks, or round numbers within the scale."""
        if self.marks:
            return [mark for mark in self.marks if self.low <= mark <= self.high]
        if not self.log or self.high < 4 * self.low:
            return round_ticks(self.low, self.high)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1, 2, 5), (1, 3), (1,)):
            ticks = [step * 10.0**power for power in decades for step in steps]
            ticks = [tick for tick in ticks if self.low <= tick <= self.high]
            if len(ticks) <= 8:
                return ticks
        return ticks[:: math.ceil(len(ticks) / 8)]


def _downsampled(curve: Series, log: bool, reduce: Reduce) -> Series:
    x, y = np.asarray(curve.x, float), np.asarray(curve.y, float)
    usable = np.isfinite(y) & (y > 0) if log else np.isfinite(y)
    indices = np.flatnonzero(usable)
    part = slice(indices[0], indices[-1] + 1) if len(indices) else slice(0)

    def reduced(values: np.ndarray) -> float:
        """Combine a group of points, ignoring non-finite values; NaN if all are."""
        values = values[np.isfinite(values)]
        return reduce(values) if len(values) else math.nan

    at, values = downsample(x[part], np.where(usable, y, math.nan)[part], _POINTS, reduced)
    return Series(curve.name, at, [None if math.isnan(value) else value for value in values], curve.number,
                  curve.dots)


def _path(curve: Series, x: _Scale, y: _Scale) -> str:
    steps, pen_is_down = [], False
    for a, b in zip(curve.x, curve.y, strict=True):
        if b is None:
            pen_is_down = False
            continue
        at = f"{x(a):.1f} {_UNITS - y(b):.2f}"
        # A line of zero length shows only its round caps, as a dot.
        steps.append(f"M{at}h0" if curve.dots else f"{'L' if pen_is_down else 'M'}{at}")
        pen_is_down = True
    kind = "dots" if curve.dots else f"line d{_dashes(curve)}"
    # A point without a value is a gap.
    points = ",".join(f"{a:.10g} " + ("" if b is None else f"{b:.6g}")
                      for a, b in zip(curve.x, curve.y, strict=True))
    return (f'<path class="s{curve.number % 8} {kind}" data-name="{escape(curve.name)}" d="{"".join(steps)}" '
            f'data-points="{points}"/>')


def _dashes(curve: Series) -> int:
    # Shift the dashes with each cycle of colors, so that 32 series look different.
    return (curve.number + curve.number // 8) % 4


def _swatch(curve: Series) -> str:
    kind = "dots" if curve.dots else f"line d{_dashes(curve)}"
    d = "M12 5h0" if curve.dots else "M0 5h24"
    return f'<svg class="swatch" viewBox="0 0 24 10" aria-hidden="true"><path class="{kind}" d="{d}"/></svg>'


def _grid(x: _Scale, y: _Scale, classes: str) -> str:
    lines = [f"M{x(tick):.1f} 0v{_UNITS}" for tick in x.ticks()]
    lines += [f"M0 {_UNITS - y(tick):.1f}h{_UNITS}" for tick in y.ticks()]
    return f'<path class="{classes}" d="{"".join(lines)}"/>'


def _ticks(scale: _Scale, form: Form, side: str) -> str:
    return "".join(f'<span style="{side}:{scale(tick) / _UNITS:.2%}">{escape(form(tick))}</span>'
                   for tick in scale.ticks())


def _describe(curve: Series, form: Form) -> str:
    values = [value for value in curve.y if value is not None]
    return (f"{curve.name}: {form(values[0])} at first, {form(values[-1])} at the end, "
            f"between {form(min(values))} and {form(max(values))}")


def _numbers_table(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    low, high = min(curve.x[0] for curve in series), max(curve.x[-1] for curve in series)
    places = [low + (high - low) * i / (_TABLE_ROWS - 1) for i in range(_TABLE_ROWS)] if high > low else [low]
    places = [*x.marks] or places
    reach = (high - low) / (_TABLE_ROWS - 1)
    rows = [[x.form(place), *(_value_near(curve, place, reach, y.form) for curve in series)] for place in places]
    return (f"<details><summary>Numbers</summary>"
            f"{table(f'{title} ({y.label})', [x.label, *(curve.name for curve in series)], rows)}</details>")


def _value_near(curve: Series, place: float, reach: float, form: Form) -> str:
    candidates = [(abs(a - place), b) for a, b in zip(curve.x, curve.y, strict=True) if b is not None]
    distance, value = min(candidates)
    return form(value) if distance <= reach / 2 else "-"


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]],
          footer: Sequence[str] | None = None) -> str:
    """Return an HTML table, which scrolls if it is wider than the page. The first column holds row headers.

    Args:
        footer: last row, for totals.
    """
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(map(_row, rows))
    foot = f"<tfoot>{_row(footer)}</tfoot>" if footer else ""
    return (f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
            f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>{foot}"
            "</table></div>")


def _row(cells: Sequence[str]) -> str:
    return (f'<tr><th scope="row">{escape(cells[0])}</th>'
            + "".join(f"<td>{escape(cell)}</td>" for cell in cells[1:]) + "</tr>")


def bars(title: str, rows: Sequence[tuple[str, dict[str, float]]], unit: str, form: Form, *,
         folded: bool = False) -> str:
    """Return a figure of stacked bars, scaled to the longest, with a table of the numbers.

    Args:
        rows: for each bar its name, and the values of its parts by name.
        folded: collapse the table of numbers.
    """
    longest = max(sum(parts.values()) for _, parts in rows) or 1.0
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    key = "".join(f'<li class="s{i % 8}"><svg class="swatch" viewBox="0 0 24 10" aria-hidden="true">'
                  f'<rect width="24" height="10"/></svg>{escape(name)}</li>' for i, name in enumerate(names))
    drawn = "".join(
        f'<dt>{escape(row)}</dt><dd aria-hidden="true">' + "".join(
            f'<i class="s{names.index(name) % 8}" style="width:{value / longest:.2%}"></i>'
            for name, value in parts.items()) + "</dd>" for row, parts in rows)
    numbers = [[row, *(form(parts[name]) if name in parts else "-" for name in names), form(sum(parts.values()))]
               for row, parts in rows]
    numbers_table = table(f"{title} ({unit})", ["", *names, "sum"], numbers)
    if folded:
        numbers_table = f"<details><summary>Numbers</summary>{numbers_table}</details>"
    return (f'<figure><figcaption>{escape(title)}</figcaption><ul class="key">{key}</ul>'
            f'<dl class="bars">{drawn}</dl>{numbers_table}</figure>')
