"""What comes from outside is read in one place: the limits of `ezpz_llm.base.outside` hold everywhere."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ezpz_llm

PACKAGE = Path(ezpz_llm.__file__).parent
THE_READER = PACKAGE / "base" / "outside.py"
PARSERS = {"json": {"load", "loads", "JSONDecoder"}, "yaml": None, "tomllib": None, "tomli": None, "marshal": None}
"""By module: what of it parses; None for all of it."""


def parsers_in(text: str) -> list[tuple[int, str]]:
    """The lines that parse by themselves, and what they use."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = PARSERS.get(node.value.id, set())
            if names is None or node.attr in names:
                found.append((node.lineno, f"{node.value.id}.{node.attr}"))
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names if PARSERS.get(alias.name, set()) is None]
        elif isinstance(node, ast.ImportFrom) and node.module in PARSERS:
            names = PARSERS[node.module]
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names
                      if names is None or alias.name in names]
    return found


def test_nothing_else_parses():
    found = {f"{path.relative_to(PACKAGE)}:{line}": what for path in PACKAGE.rglob("*.py") if path != THE_READER
             for line, what in parsers_in(path.read_text())}
    assert not found, "use ezpz_llm.base.outside"


@pytest.mark.parametrize("text", ["import json\njson.loads('1')", "from json import load", "import tomllib",
                                  "import yaml", "import json\njson.JSONDecoder()"])
def test_the_lint_finds(text):
    assert parsers_in(text)
    assert not parsers_in("import json\njson.dumps(1)")
