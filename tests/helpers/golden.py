"""Golden files with the expected output of a program: EZPZ_LLM_WRITE_GOLDEN=1 pytest … rewrites them."""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "golden"


def check_golden(name: str, text: str) -> None:
    """Check that `text` equals the golden file. After rewriting one, review the diff."""
    path = _FOLDER / name
    if os.environ.get("EZPZ_LLM_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"EZPZ_LLM_WRITE_GOLDEN=1 rewrites {path}, if this is intended"
