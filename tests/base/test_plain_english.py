"""Docstrings begin with a verb or a noun, not with a clause."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from places import ROOT, TESTS

import ezpz_llm

PACKAGE = Path(ezpz_llm.__file__).parent
CLAUSES = {"What", "Whether", "Where", "When", "Which", "Who", "Whose", "How", "That", "Those", "Of", "By", "Its",
           "If", "As", "One", "With", "Without"}


def docstrings_in(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, including docstrings of attributes."""
    for node in ast.walk(ast.parse(text)):
        statements = getattr(node, "body", None)
        if not isinstance(statements, list):
            continue
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) \
                and (docstring := ast.get_docstring(node)):
            yield statements[0].lineno, docstring
        for before, statement in pairwise(statements):
            if isinstance(before, (ast.Assign, ast.AnnAssign)) and isinstance(statement, ast.Expr) \
                    and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
                yield statement.lineno, statement.value.value


def clauses_in(text: str) -> list[tuple[int, str]]:
    return sorted((line, docstring.partition("\n")[0]) for line, docstring in docstrings_in(text)
                  if CLAUSES.intersection(re.findall(r"\w+", docstring)[:1]))


def clauses_below(folder: Path) -> dict[str, str]:
    return {f"{path.relative_to(folder)}:{line}": docstring for path in folder.rglob("*.py")
            for line, docstring in clauses_in(path.read_text())}


@pytest.mark.parametrize("package", sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
def test_docstrings_begin_with_a_verb_or_a_noun(package):
    assert not clauses_below(PACKAGE / package), 'write "Return …", or a noun phrase'


@pytest.mark.parametrize("folder", [".ci", "benchmarks", *sorted(
    f"tests/{path.name}" for path in TESTS.iterdir() if any(path.rglob("*.py")))])
def test_docstrings_of_tests_and_benchmarks_begin_with_a_verb_or_a_noun(folder):
    assert not clauses_below(ROOT / folder), 'write "Return …", or a noun phrase'


def functions_without_docstring(text: str) -> list[tuple[int, str]]:
    """Return abstract methods, and public functions of more than four lines, that have no docstring."""
    return [(node.lineno, node.name) for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not ast.get_docstring(node)
            and (any(ast.unparse(decorator) == "abstractmethod" for decorator in node.decorator_list)
                 or (not node.name.startswith("_") and (node.end_lineno or 0) - node.lineno > 3
                 and node.name not in ("forward", "backward")))]  # torch.autograd.Function


@pytest.mark.parametrize("package", [".", *sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))])
def test_public_functions_have_docstrings(package):
    files = (PACKAGE / package).glob("*.py") if package == "." else (PACKAGE / package).rglob("*.py")
    assert not {f"{path.relative_to(PACKAGE)}:{line}": name for path in files
                for line, name in functions_without_docstring(path.read_text())}


def test_function_without_docstring_is_found():
    body = "\n".join(["        a = 1"] * 4)
    text = f"class A:\n    def f(self):\n{body}\n    @abstractmethod\n    def _g(self): ...\n    def h(self): ...\n"
    assert functions_without_docstring(text) == [(2, "f"), (8, "_g")]


def test_clause_is_found():
    text = 'def f():\n    """What a rank answered."""\nA = 1\n"""Of a rank."""\nB = 2\n"""Answer of a rank."""\n'
    assert clauses_in(text) == [(2, "What a rank answered."), (4, "Of a rank.")]
