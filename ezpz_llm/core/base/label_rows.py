"""Layout of labeled rows, as in a run's first and last lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable


def align_rows(rows: Iterable[tuple[str, str]], width: int, label_width: int = 11) -> str:
    """Format (label, text) rows as lines of at most `width` columns. Wrapped lines are indented to the text."""
    lines: list[str] = []
    for label, text in rows:
        lines += textwrap.wrap(text, max(width, 3 * label_width), initial_indent=label.ljust(label_width),
                               subsequent_indent=" " * label_width, break_long_words=False, break_on_hyphens=False)
    return "".join(f"{line}\n" for line in lines)
