"""One HTML page that needs nothing besides itself: no network, no server; light or dark, narrow or wide."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

_HERE = Path(__file__).parent


def page(title: str, intro: str, sections: Sequence[tuple[str, str]]) -> str:
    """The page. `intro` and the sections' bodies are HTML, the title and their headings are text.

    The browser is told to load nothing from anywhere, so a mistake in a body could not either.
    """
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    body = "".join(f"<section><h2>{escape(heading)}</h2>{text}</section>\n" for heading, text in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{escape(title)}</h1>\n{intro}\n{body}</main>\n<script>\n{script}</script>\n"
        "</body>\n</html>\n")


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
