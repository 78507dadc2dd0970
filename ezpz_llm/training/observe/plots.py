"""Text plots of a run's history for the terminal and, without color, for `plots/*.txt`."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ezpz_llm.core.rundir import RunDir, SideFiles
from ezpz_llm.training.observe.history import History, read_history, steady_steps
from ezpz_llm.training.observe.terminal import DEFAULT_WIDTH, terminal_width, wants_ascii

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Marks that distinguish curves without color."""
POINTS = "o"
"""Mark of points that are not connected by a line."""
COLORS = (39, 208, 42, 170, 220, 205, 51, 250)
"""xterm-256 color numbers that are distinguishable on black and on white backgrounds."""
_HUGE = 1e300
_IN_ASCII = str.maketrans({**dict.fromkeys("┌┐└┘├┤┬┴┼", "+"), "│": "|", "─": "-", "█": "#", "■": "#"})
_LOW_HEIGHT = 9  # lines of a plot that only needs to show whether a value was steady
_DOTS_PER_COLUMN = 2  # braille cells are two dots wide

Values = Sequence[float | None]
"""Coordinates of a series; None or NaN marks a missing value."""
Reduce = Callable[[Sequence[float]], float]


def downsample(x: Sequence[float], y: Sequence[float], points: int,
               reduce: Reduce = statistics.fmean) -> tuple[list[float], list[float]]:
    """Reduce a series to at most `points` points.

    Each is at the mean x and the reduced y of one of `points` groups of consecutive points.
    """
    if len(x) <= points:
        return list(x), list(y)
    edges = [round(i * len(x) / points) for i in range(points + 1)]
    groups = [slice(a, b) for a, b in itertools.pairwise(edges)]
    return [statistics.fmean(x[group]) for group in groups], [reduce(y[group]) for group in groups]


@dataclass(frozen=True)
class Curve:
    """Series of a plot, drawn with the character `mark`, or as braille dots if that is empty.

    With the mark POINTS, the points are not connected by a line.

    `color` is a number of a 256-color terminal, or -1 for plotext's choice.
    """

    name: str
    x: Values
    y: Values
    mark: str = ""
    color: int = -1

    @property
    def is_line(self) -> bool:
        """True if the points are connected by a line."""
        return self.mark != POINTS


def series_plot(x: Values, y: Values, title: str, xlabel: str, ylabel: str,
                width: int = DEFAULT_WIDTH, height: int = 16, *, color: bool = False,
                reduce: Reduce = statistics.fmean, label: str = "",
                points: tuple[str, Values, Values] | None = None, is_ascii: bool | None = None) -> str:
    """Return a line plot of y over x; see `curves_plot`.

    Args:
        label: name of the line in the heading, used only with `points`.
        points: second series (name, x, y), drawn as unconnected marks.
    """
    curves = [Curve(label, x, y)]
    if points is not None:
        curves.append(Curve(points[0], points[1], points[2], mark=POINTS))
        # The legend is in the heading, since plotext's legend hides part of the curve.
        xlabel += f"; line: {label}, {POINTS}: {points[0]}"
    return curves_plot(curves, title, xlabel, ylabel, width, height, color=color, reduce=reduce,
                       is_ascii=is_ascii)


def curves_plot(curves: Sequence[Curve], title: str, xlabel: str, ylabel: str, width: int = DEFAULT_WIDTH,
                height: int = 16, *, color: bool = False, reduce: Reduce = statistics.fmean,
                is_ascii: bool | None = None) -> str:
    """Return a plot of several series as text of `width` by `height` characters, ending in a newline.

    Non-finite values and None are skipped. Long lines are reduced to two values per column.

    Args:
        is_ascii: use no braille or box-drawing characters (default: True if standard output cannot show them).
    """
    is_ascii = wants_ascii() if is_ascii is None else is_ascii
    import plotext

    heading = f"{title} ({ylabel}) over {xlabel}" if ylabel else f"{title} over {xlabel}"
    drawn = []
    for curve in curves:
        usable_x, usable_y = _drawable(curve.x, curve.y)
        points = _DOTS_PER_COLUMN * width if curve.is_line else len(usable_x)
        x, y = downsample(usable_x, usable_y, points, reduce)
        if len(x):
            drawn.append((curve, x, y))
    if not drawn:
        return f"{heading}: nothing to draw\n"

    figure = _figure(heading, width, height)
    for curve, x, y in drawn:
        symbol = curve.mark or ("*" if is_ascii else "braille")
        marker = symbol if curve.color < 0 else plotext.marker(symbol, pixel=curve.color)
        signal = figure.signal(x, y, marker=marker)
        if curve.is_line:
            signal.lines()
        figure.draw(signal)
    return _figure_text(figure, color, is_ascii, x=[value for _, x, _ in drawn for value in x],
                        y=[value for _, _, y in drawn for value in y])


def bars_plot(bars: Sequence[tuple[str, float]], title: str, width: int = DEFAULT_WIDTH, *,
              color: bool = False) -> str:
    """Return a horizontal bar per named value, the first on top, as text that ends in a newline."""
    figure = _figure(title, width, 2 * len(bars) + 3)
    names, values = [name for name, _ in reversed(bars)], [value for _, value in reversed(bars)]
    figure.draw(figure.bar(names, values, orientation="horizontal", width=0.05))
    return _figure_text(figure, color, wants_ascii(), x=[0.0, *(value for value in values if value > 0)])


def _figure(title: str, width: int, height: int) -> Any:
    import plotext

    # Without a terminal, plotext limits plots to 80x22 by default. Its only figure is global, so clear it.
    plotext.terminal.limit(False, False)
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, height)
    figure.title(title)
    return figure


def _figure_text(figure: Any, color: bool, is_ascii: bool, **axes: Sequence[float]) -> str:
    """Return the text of a figure, with round ticks on the axes whose values are given."""
    for axis, values in axes.items():
        ticks = _round_ticks(min(values), max(values))
        figure.ruler(axis).ticks(ticks, [f"{tick:.6g}" for tick in ticks])
    text = figure.build().string(colorless=not color)
    if is_ascii:
        text = text.translate(_IN_ASCII)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def plot_run(run_dir: RunDir, *, width: int | None = None, color: bool = False, history: History | None = None,
             side: SideFiles | None = None, unit: str = "nats/token") -> str:
    """Plot the loss and throughput of a run: tokens/s, or the step time if that is unknown.

    Writes plain text to `plots/<metric>.txt`, and returns both plots for the console. The throughput plot has fewer
    lines, and omits the first and last steps, which would dominate its scale.

    Args:
        history: metrics of the run, if already read.
        side: writer of auxiliary files.
        unit: unit of the loss.
    """
    width, side = terminal_width() if width is None else width, side or SideFiles()
    rows = read_history(run_dir) if history is None else history
    evaluated = rows.select(map(math.isfinite, rows.column("val_loss")))
    timed = steady_steps(rows)
    validation = ("validation", evaluated.steps, evaluated.column("val_loss")) if len(evaluated) else None
    draw = partial(series_plot, xlabel="step", width=width)
    speed, title, unit_of_speed, scale = "tokens_per_second", "tokens/s", "", 1.0
    if len(timed) and not timed.finite(speed):
        speed, title, unit_of_speed, scale = "step_time_s", "step time", "ms", 1e3
    drawings = {
        "loss": partial(draw, rows.steps, rows.column("loss"), "loss", ylabel=unit, label="training",
                        points=validation),
        speed: partial(draw, timed.steps, [value * scale for value in timed.column(speed)], title,
                       ylabel=unit_of_speed, reduce=statistics.median),
    }
    for metric, draw_metric in drawings.items():
        side.write(run_dir.plots / f"{metric}.txt", draw_metric(is_ascii=False))
    return drawings["loss"](color=color) + "\n" + drawings[speed](color=color, height=_LOW_HEIGHT)


def _drawable(x: Values, y: Values) -> tuple[list[float], list[float]]:
    # NaN makes plotext's C++ code abort the process, so it must be removed. Values from 1e300 are removed
    # as well, because the range max - min could overflow.
    pairs = [(a, b) for a, b in zip(x, y, strict=True)
             if a is not None and b is not None and abs(a) < _HUGE and abs(b) < _HUGE]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _round_ticks(low: float, high: float) -> list[float]:
    """Return two to eight round numbers between `low` and `high`, or one number if they are equal."""
    if not high - low > abs(high) * 1e-12:
        return [low]
    raw = (high - low) / 7
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= raw)
    first = math.ceil(low / step)
    return [tick * step for tick in range(first, math.floor(high / step) + 1)]
