"""Console scripts `launch` and `ezpz-llm`.

A command is a module of this package that defines `main(argv)`, or a package with a `__main__` module. The first
line of its docstring is its summary in `ezpz-llm --help`.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from ezpz_llm.core.base import UserError, print_lines, run_command, unknown_name_error, version_text
from ezpz_llm.core.base.help_pages import examples, help_width
from ezpz_llm.core.base.shell_commands import to_typable

_PACKAGE = Path(__file__).parent
_GROUPS = {
    "Run": ("launch", "train", "submit"),
    "Prepare a run": ("doctor", "preflight", "test_dist", "data", "layouts"),
    "Monitor and diagnose a run": ("watch", "why", "report", "explain"),
    "Use a trained model": ("generate", "evaluate", "checkpoint"),
    "Scaling studies and certificates": ("scale", "certify"),
    "Shell integration": ("completion",),
}
"""Commands by task."""
_SYNONYMS = dict.fromkeys(("status", "tail", "follow"), "watch")
"""Names that other programs use for a command, for the suggestion in the error."""


def launch() -> int:
    """Run `launch …`."""
    from ezpz_llm.launcher.running.command import main as launch_main

    return run_command(launch_main)


def main() -> int:
    """Run `ezpz-llm COMMAND …`."""
    return run_command(_dispatch)


def _dispatch(argv: Sequence[str]) -> int | None:
    if not argv or argv[0] in ("-h", "--help"):
        print_lines(_help())
        return 0 if argv else 2
    if argv[0] == "--version":
        print_lines(version_text())
        return 0
    commands = find_commands()
    name = argv[0].replace("-", "_")
    if name in _SYNONYMS:
        raise UserError(f"unknown command {argv[0]!r}", where="ezpz-llm", instead=f"ezpz-llm {_SYNONYMS[name]}")
    if name not in commands:
        raise unknown_name_error("command", argv[0], commands, where="ezpz-llm")
    sys.argv = [f"ezpz-llm {name}", *argv[1:]]
    return importlib.import_module(module_of(commands[name])).main(argv[1:])


def find_commands() -> dict[str, Path]:
    """Return the file of each command by name, without importing any."""
    modules = {path.stem: path for path in _PACKAGE.glob("*.py") if path != Path(__file__)}
    packages = {path.parent.name: path for path in _PACKAGE.glob("*/__main__.py")}
    return {name: path for name, path in sorted({**modules, **packages}.items()) if _defines_main(path)}


def module_of(path: Path) -> str:
    """Return the dotted module name of a command's file."""
    return ".".join((_PACKAGE.name, *path.relative_to(_PACKAGE).with_suffix("").parts))


def _defines_main(path: Path) -> bool:
    # A __main__ module may import main from another module of its package.
    text = path.read_text(encoding="utf-8")
    return path.stem == "__main__" or "\ndef main(" in text


def _help() -> str:
    commands = find_commands()
    grouped = {name for names in _GROUPS.values() for name in names}
    others = tuple(name for name in commands if name not in grouped)
    lines = [f"usage: {to_typable('ezpz-llm COMMAND')} …     (each has --help, with examples)",
             f"       {to_typable('ezpz-llm --version')}"]
    for title, names in {**_GROUPS, "Other commands": others}.items():
        lines += ["", title] if names else []
        lines += [textwrap.fill(f"  {name:<10}  {_summary(commands[name])}", help_width(), break_on_hyphens=False,
                                subsequent_indent=" " * 14) for name in names if name in commands]
    return "\n".join([*lines, "", examples((
        "launch -n 2 python3 -m ezpz_llm.train  a first run; `launch` is short for `ezpz-llm launch`",
        "ezpz-llm report  plot its curves"))])


def _summary(path: Path) -> str:
    """Return the first line of a command's docstring, without importing it."""
    import ast  # only for help pages

    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
