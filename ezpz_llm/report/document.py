"""Self-contained HTML page of paragraphs, tables and figures, without scripts."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Sequence
from html import escape

from ezpz_llm.base import escape_control_characters
from ezpz_llm.observe.tables import Table
from ezpz_llm.report.figures import PAGE, Figure, render

Part = str | Table | Figure
"""Paragraph, table, or figure of a section."""

_STYLE = """
body { max-width: 72rem; margin: auto; padding: 1rem; font: 16px/1.5 sans-serif; overflow-wrap: anywhere; }
.table { margin-top: 1rem; overflow-x: auto; overflow-wrap: normal; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #d1d9e0; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0; }
figcaption { font-weight: 600; }
img { width: 100%; max-width: 60rem; }
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
    svg, = render(part, PAGE, ["svg"])
    title, image = escape(part.title), b64encode(svg).decode()
    # As an image, since browsers run no scripts in images.
    return (f'<figure>\n<figcaption>{title}</figcaption>\n<img alt="{title}" '
            f'src="data:image/svg+xml;base64,{image}">\n</figure>\n')


def _table(content: Table) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in content.notes)
    notes = f"<ul>{notes}</ul>\n" if notes else ""
    if not content.columns:
        return (f"<p>{escape(content.title)}</p>\n" if content.title else "") + notes
    rows = "".join(map(_row, [*content.rows, *([content.footer] if content.footer else [])]))
    head = "".join(f"<th>{escape(name)}</th>" for name in content.columns)
    return (f'<div class="table"><table>\n<caption>{escape(content.title)}</caption>\n<tr>{head}</tr>\n'
            f"{rows}</table></div>\n{notes}")


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"
