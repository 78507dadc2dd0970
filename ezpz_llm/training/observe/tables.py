"""Small tables for the terminal (rich) and for logs (plain aligned text)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ezpz_llm.core.base import apportion, escape_control_characters
from ezpz_llm.training.observe.terminal import terminal_width, wants_ascii

_TABLE_WIDTH = 100


@dataclass(frozen=True)
class Table:
    """Table of text. The first column names the rows, and an optional footer has totals. `notes` are sentences
    below the table; a table without columns consists of notes only."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    footer: tuple[str, ...] | None = None


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, footer: Sequence[str] | None = None,
          rich: bool = False, width: int = _TABLE_WIDTH, marked: Sequence[int] = ()) -> str:
    """Return a table as text that ends in a newline. The first column is left-aligned, others are right-aligned.

    Args:
        footer: last row, for totals.
        rich: draw the table for this terminal, with at most `width` columns.
        marked: indices of rows to print in red, if `rich`.
    """
    # Names of runs, nodes, and settings come from files, which other users may have written.
    rows = [[escape_control_characters(cell) for cell in row] for row in rows]
    columns = [escape_control_characters(name) for name in columns]
    footer = footer and [escape_control_characters(cell) for cell in footer]
    title = escape_control_characters(title)
    if not rich:
        return _plain(title, columns, rows, footer)
    from rich.box import ASCII, HEAVY_HEAD
    from rich.console import Console
    from rich.table import Table

    drawn = Table(show_footer=footer is not None, box=ASCII if wants_ascii() else HEAVY_HEAD)
    for i, name in enumerate(columns):
        # Fold instead of truncate, so that no digits are lost.
        drawn.add_column(name, footer[i] if footer else "", justify="left" if i == 0 else "right", overflow="fold")
    for i, row in enumerate(rows):
        drawn.add_row(*row, style="red" if i in marked else None)
    text = io.StringIO()
    Console(file=text, force_terminal=True, width=min(width, terminal_width())).print(drawn)
    return f"{title}\n{text.getvalue()}"


def table_text(content: Table, *, rich: bool = False) -> str:
    """Return a table as text, followed by one line per note."""
    return table(content.title, content.columns, content.rows, footer=content.footer, rich=rich) + "".join(
        f"  {escape_control_characters(note)}\n" for note in content.notes)


def wall_table(title: str, wall: Mapping[str, float]) -> Table:
    """Return a table of a run's wall-time breakdown, with shares and the sum."""
    rows = tuple((name, f"{seconds:.1f}", share) for (name, seconds), share
                 in zip(wall.items(), percentages(list(wall.values())), strict=True))
    return Table(title, ("", "seconds", "share"), rows, footer=("run", f"{sum(wall.values()):.1f}", "100.0 %"))


def percentages(parts: Sequence[float]) -> list[str]:
    """Format the shares of `parts` in percent with one decimal, rounded so that the printed shares sum to 100.0.

    The largest remainders are rounded up. Negative parts, which are clock noise around zero, are included.
    """
    if not sum(parts) > 0:
        return ["-"] * len(parts)
    return [f"{tenths / 10:.1f} %" for tenths in apportion(parts, 1000)]


def _plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], footer: Sequence[str] | None) -> str:
    body = [columns, *rows, *([footer] if footer else [])]
    widths = [max(len(row[i]) for row in body) for i in range(len(columns))]
    lines = [title]
    for row in body:
        cells = [cell.ljust(width) if i == 0 else cell.rjust(width)
                 for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines) + "\n"
