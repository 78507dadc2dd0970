"""Files that hold what a program is meant to print: EZPZ_LLM_WRITE_GOLDEN=1 pytest … writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "golden"


def check_golden(name: str, text: str) -> None:
    """Fail where `text` is not the file's; a change that is meant is to be read in the diff of the file."""
    path = _FOLDER / name
    if os.environ.get("EZPZ_LLM_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"EZPZ_LLM_WRITE_GOLDEN=1 rewrites {path}, if this is meant"
