"""Check that a page's HTML elements are closed in order."""

from __future__ import annotations

from html.parser import HTMLParser


class _Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Ignore self-closing elements, such as a path."""


def check_balance(page: str) -> None:
    """Check that every element is closed, in order."""
    balance = _Balance()
    balance.feed(page)
    assert balance.open == []
