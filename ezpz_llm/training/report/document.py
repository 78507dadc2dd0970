"""Self-contained HTML page of paragraphs, tables and figures, without scripts."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Sequence
from html import escape

from ezpz_llm.core.base import escape_control_characters
from ezpz_llm.training.observe.tables import Table
from ezpz_llm.training.report.figures import COLUMN, PAGE, Figure, render

Part = str | Table | Figure
"""Paragraph, table, or figure of a section."""

_NARROW = "(max-width: 699px)"
_LONG, _LONG_CLASS = 30, ' class="long"'
"""Number of characters above which a cell, such as a command, is wrapped."""
_STYLE = """
:root { color-scheme: light dark; --line: #d1d9e0; }
body { max-width: 72rem; margin: auto; padding: 1rem; font: 16px/1.5 sans-serif; overflow-wrap: anywhere; }
.table { overflow-x: auto; overflow-wrap: normal; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.long { min-width: 16rem; white-space: normal; overflow-wrap: anywhere; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0; }
figcaption { font-weight: 600; }
img { width: 100%; max-width: 60rem; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3d444d; background: #1a1a1a; color: #e6e6e6; }
  /* Figures are drawn on white: white becomes the page's background, and colors keep their hue. */
  img { filter: invert(.9) hue-rotate(180deg); }
}
"""


def page(title: str, command: str, sections: Sequence[tuple[str, Sequence[Part]]], now: float | None = None) -> str:
    """Return the page as HTML. All text is escaped, also invisible characters.

    Args:
        command: command that writes the page.
        sections: heading and parts of each section.
        now: time in epoch seconds.

    Raises:
        UserError: matplotlib cannot be imported.
    """
    written = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    body = "".join(f"<section>\n<h2>{escape(heading)}</h2>\n{''.join(map(_part, parts))}</section>\n"
                   for heading, parts in sections)
    return escape_control_characters(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"<p>Written {written} by <code>{escape(command)}</code>.</p>\n{body}</body>\n</html>\n")


def _part(part: Part) -> str:
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>\n"
    if isinstance(part, Table):
        return _table(part)
    title = escape(part.title)
    # As images, since browsers run no scripts in images. A narrow screen shows panels below each other, since an
    # image as wide as the page would have text of 5 pixels there.
    return (f'<figure>\n<figcaption>{title}</figcaption>\n<picture><source media="{_NARROW}" '
            f'srcset="{_image_url(part, COLUMN)}"><img alt="{title}" src="{_image_url(part, PAGE)}"></picture>\n'
            "</figure>\n")


def _image_url(figure: Figure, width: float) -> str:
    svg, = render(figure, width, ["svg"])
    return f"data:image/svg+xml;base64,{b64encode(svg).decode()}"


def _table(content: Table) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in content.notes)
    notes = f"<ul>{notes}</ul>\n" if notes else ""
    if not content.columns:
        return (f"<p>{escape(content.title)}</p>\n" if content.title else "") + notes
    rows = "".join(map(_row, [*content.rows, *([content.footer] if content.footer else [])]))
    head = "".join(f"<th>{escape(name)}</th>" for name in content.columns)
    # The title is outside of the part that scrolls, so that it wraps.
    return (f'<figure>\n<figcaption>{escape(content.title)}</figcaption>\n<div class="table"><table>\n'
            f"<tr>{head}</tr>\n{rows}</table></div>\n</figure>\n{notes}")


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(map(_cell, cells))}</tr>\n"


def _cell(text: str) -> str:
    return f"<td{_LONG_CLASS if len(text) > _LONG else ''}>{escape(text)}</td>"
