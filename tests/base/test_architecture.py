"""Rules for the whole code: packages import in the order of docs/reference/architecture.md, input is parsed in one
place (`ezpz_llm.base.outside`), and ruff reads every file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slowness import scaled

import ezpz_llm

PACKAGE = Path(ezpz_llm.__file__).parent
THE_READER = PACKAGE / "base" / "outside.py"
PARSERS = {"json": {"load", "loads", "JSONDecoder"}, "yaml": None, "tomllib": None, "tomli": None, "marshal": None}
"""By module: what of it parses; None for all of it."""


def packages() -> list[str]:
    """The packages of docs/reference/architecture.md, in the order of its table."""
    page = PACKAGE.parent / "docs" / "reference" / "architecture.md"
    section = page.read_text().split("\n## Packages\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)/`", section, re.MULTILINE)


def packages_imported(text: str) -> Iterator[tuple[int, str]]:
    """(line, package or root module) of each import of this package, those in functions too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "ezpz_llm" and rest and not rest.startswith("__"):
                yield node.lineno, rest.partition(".")[0]


def test_the_table_names_every_package():
    assert sorted(packages()) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def test_a_package_imports_only_packages_above_it():
    order = packages()
    found = {f"{path.relative_to(PACKAGE)}:{line}": other for place, name in enumerate(order)
             for path in (PACKAGE / name).rglob("*.py") if path.name != "__main__.py"
             for line, other in packages_imported(path.read_text()) if other not in order[:place + 1]}
    assert not found, "below in docs/reference/architecture.md, or a command"


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


def private_names_in(text: str) -> list[tuple[int, str]]:
    """The lines that use a name of torch or DeepSpeed which begins with an underscore."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module:
            name = ".".join((node.module, *(alias.name for alias in node.names)))
        else:
            continue
        if re.match(r"(torch|deepspeed)\.(?:\w+\.)*_(?!_)\w+(\.|$)", name):
            found.append((node.lineno, name))
    return found


STANDARD = {"_exit", "_replace", "_actions", "_option_string_actions", "_run_exitfuncs", "_SubParsersAction"}
"""Private names of Python's own library."""


def foreign_names_in(tree: ast.AST, ours: set[str]) -> list[tuple[int, str]]:
    """The lines that ask an object for a private name which is none of these, or for one of ZeRO's (`ds_…`)."""
    return [(node.lineno, node.attr) for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr.startswith(("_", "ds_"))
            and not node.attr.startswith("__") and node.attr not in ours]


def names_made_in(tree: ast.AST) -> Iterator[str]:
    """Whatever a module defines or sets."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def test_private_names_of_others_objects_are_looked_up_too():
    """What only objects have is no name of a module: it is told by its own underscore."""
    tables = PACKAGE / "dist" / "private_names.py", PACKAGE / "layout" / "deepspeed_versions.py"
    looked_up = {word for table in tables for word in re.findall(r"\w+", table.read_text())}
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    ours = STANDARD.union(*map(names_made_in, trees.values()))
    found = {f"{path.relative_to(PACKAGE)}:{line}": name for path, tree in trees.items()
             for line, name in foreign_names_in(tree, ours) if name not in looked_up}
    assert not found, "enter it in ezpz_llm/dist/private_names.py, or layout/deepspeed_versions.py"
    assert foreign_names_in(ast.parse("table.weight._hp_grad"), ours) == [(1, "_hp_grad")]


def test_private_names_of_others_are_looked_up_in_one_place():
    found = {f"{path.relative_to(PACKAGE)}:{line}": name for path in PACKAGE.rglob("*.py")
             for line, name in private_names_in(path.read_text()) if path.name != "private_names.py"}
    assert not found, "take it from ezpz_llm.dist.private_names"
    assert private_names_in("import torch\ntorch.cpu._is_amx_tile_supported()")
    assert private_names_in("from torch.utils._pytree import tree_leaves")
    assert private_names_in("from deepspeed.utils.groups import _WORLD_GROUP")


def test_ruff_reads_every_module():
    """Its default skips folders named dist, ezpz_llm/dist among them."""
    root = PACKAGE.parent
    listed = subprocess.run([sys.executable, "-m", "ruff", "check", "--show-files", "."], cwd=root, check=True,
                            capture_output=True, text=True, timeout=scaled(60)).stdout.splitlines()
    assert set(map(str, PACKAGE.rglob("*.py"))) <= set(listed)
