"""The console scripts `launch` and `ezpz-llm`. A command is a module of this package that defines `main(argv)`, or
a package with such a module `__main__`; its docstring's first line is its line in the list."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from ezpz_llm.base.errors import run_command, unknown, version_text

_PACKAGE = Path(__file__).parent


def launch() -> int:
    """`launch …`"""
    from ezpz_llm.launch.__main__ import main as launch_main

    return run_command(launch_main)


def main() -> int:
    """`ezpz-llm COMMAND …`"""
    return run_command(_dispatch)


def _dispatch(argv: Sequence[str]) -> int | None:
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(version_text())
        return 0
    commands = find_commands()
    name = argv[0].replace("-", "_")
    if name not in commands:
        raise unknown("command", argv[0], commands, where="ezpz-llm")
    sys.argv = [f"ezpz-llm {name}", *argv[1:]]
    return importlib.import_module(module_of(commands[name])).main(argv[1:])


def find_commands() -> dict[str, Path]:
    """The commands by name with their files; nothing is imported."""
    modules = {path.stem: path for path in _PACKAGE.glob("*.py") if path != Path(__file__)}
    packages = {path.parent.name: path for path in _PACKAGE.glob("*/__main__.py")}
    return {name: path for name, path in sorted({**modules, **packages}.items()) if _defines_main(path)}


def module_of(path: Path) -> str:
    """Return the module of a command's file, for import."""
    return ".".join((_PACKAGE.name, *path.relative_to(_PACKAGE).with_suffix("").parts))


def _defines_main(path: Path) -> bool:
    # A command either defines main or, in a __main__ module, imports it from beside.
    text = path.read_text(encoding="utf-8")
    return path.stem == "__main__" or "\ndef main(" in text


def _help() -> str:
    lines = ["usage: ezpz-llm COMMAND …     (each has --help)", "       ezpz-llm --version", ""]
    for name, path in find_commands().items():
        summary = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        lines.append(f"  {name:<10}  {summary}")
    return "\n".join(lines)
