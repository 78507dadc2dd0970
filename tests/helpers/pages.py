"""Check that a page is well-formed HTML without scripts or external resources, and read its figures."""

from __future__ import annotations

import base64
import xml.etree.ElementTree as xml
from html.parser import HTMLParser

_TAGS = {"html", "head", "meta", "title", "style", "body", "section", "h1", "h2", "p", "code", "ul", "li", "div",
         "table", "tr", "th", "td", "figure", "figcaption", "picture", "source", "img"}
_ATTRIBUTES = {"lang", "charset", "name", "content", "class", "alt", "src", "media", "srcset"}
_SVG = "data:image/svg+xml;base64,"


class _Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.figures: dict[str, xml.Element] = {}
        self.narrow_figures: list[xml.Element] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        assert tag in _TAGS
        assert set(values) <= _ATTRIBUTES, tag
        if tag == "img":
            self.figures[values["alt"] or ""] = _read_svg((values["src"] or "").removeprefix(_SVG))
        elif tag == "source":
            self.narrow_figures.append(_read_svg((values["srcset"] or "").removeprefix(_SVG)))
        elif tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _read_svg(text: str) -> xml.Element:
    root = xml.fromstring(base64.b64decode(text, validate=True))
    for element in root.iter():
        assert not element.tag.endswith("script")
        for name, value in element.attrib.items():
            assert not name.startswith("on")
            assert not name.endswith("href") or value.startswith("#"), "no external resources"
    return root


def check_page(page: str) -> dict[str, xml.Element]:
    """Check a page, and return the SVG of each figure by its title."""
    return _checked(page).figures


def check_narrow_page(page: str) -> list[xml.Element]:
    """Check a page, and return the SVG of each figure for narrow screens."""
    return _checked(page).narrow_figures


def _checked(page: str) -> _Checker:
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    return checker


def figure_text(figure: xml.Element) -> list[str]:
    """Return the texts of a figure: labels, ticks and legend."""
    return ["".join(element.itertext()).strip() for element in figure.iter("{http://www.w3.org/2000/svg}text")]
