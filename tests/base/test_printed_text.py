"""Text is printed through one function, which escapes control characters in parts that come from others."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest
from places import ROOT

from ezpz_llm.core.base import print_lines

_PACKAGE = ROOT / "ezpz_llm"
_EXCEPTIONS = {
    "core/base/errors.py": "print_lines, and messages that str(UserError) has escaped",
    "watch.py": "moves the cursor to redraw its lines, which are escaped",
    "training/observe/throughput.py": "redraws its line, which has only numbers",
}
_IN_SCRIPTS = ("training/library/", "training/engine/")
"""Folders that print in a script's own process."""


def _calls_of_print(path: Path) -> list[int]:
    return [node.lineno for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"]


def test_no_other_module_calls_print() -> None:
    found = {name: lines for path in sorted(_PACKAGE.rglob("*.py"))
             if not (name := path.relative_to(_PACKAGE).as_posix()).startswith(_IN_SCRIPTS)
             and (lines := _calls_of_print(path))}
    assert found.keys() == _EXCEPTIONS.keys()


@pytest.mark.parametrize(("text", "keeps_colors", "printed"), [
    ("a\x1b]0;b\x07\x9bc\n\td", False, "a\\x1b]0;b\\x07\\x9bc\n\td|"),
    ("\x1b[31mred\x1b[0m", False, "red|"),
    ("\x1b[31mred\x1b[0m \x1b[2J\r", True, "\x1b[31mred\x1b[0m \\x1b[2J\\r|"),
    ("", True, "|")])
def test_control_characters_are_escaped(text: str, keeps_colors: bool, printed: str) -> None:
    file = io.StringIO()
    print_lines(text, keeps_colors=keeps_colors, end="|", file=file)
    assert file.getvalue() == printed
