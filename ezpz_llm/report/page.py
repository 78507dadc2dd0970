"""One HTML page that needs nothing besides itself: no network, no server; light or dark, narrow or wide."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

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
    """How a policy names an element by its text."""
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


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
