"""Commands in messages, rewritten so that they run this environment's launch, ezpz-llm, pip, and python3."""

from __future__ import annotations

import os
import re
import shutil
import sys

WITH_ENV_VARIABLE = "EZPZ_LLM_WITH_ENV"
"""Environment variable with the path of launchers/with-env as typed. Unset if launch is on PATH without it."""

# Separators between two commands. A second command within a clause is an argument of the first, as in
# submit … -- launch ….
_CLAUSES = re.compile(r"([(`\n]|[;:,] | or | and )")
_BEGIN = re.compile(r"(?<![\w./-])(?<!with-env )"
                    r"(?:launch (?=-|python3|\./|\[|…|COMMAND)|ezpz-llm (?=[a-z])|pip (?=install)"
                    r"|python3 (?=-m ezpz_llm\.))")


def to_typable(command: str) -> str:
    """Return a command that begins with `launch`, `ezpz-llm`, `pip` or `python3` in the form to type here."""
    word, _, rest = command.partition(" ")
    if typed := os.environ.get(WITH_ENV_VARIABLE):
        return f"{typed} {command}"
    if shutil.which("launch") is not None:
        return command
    # The environment's programs are not on PATH: Python was started by its path, or the package is on PYTHONPATH.
    if rest.startswith("--version"):
        return command  # `python3 -m` has no form of it
    python = _python_command()
    rest = re.sub(r"\bpython3 (?=-m ezpz_llm\.)", lambda _: f"{python} ", rest)
    module = {"launch": "-m ezpz_llm.launch", "pip": "-m pip", "python3": ""}.get(word)
    if word == "ezpz-llm":
        return f"{python} -m ezpz_llm.{rest}"
    return " ".join(filter(None, (python, module, rest))) if module is not None else command


def to_typable_text(text: str) -> str:
    """Replace the first command of each clause in a text by its `to_typable` form."""
    return "".join(_rewrite_clause(clause) for clause in _CLAUSES.split(text))


def _rewrite_clause(clause: str) -> str:
    match = _BEGIN.search(clause)
    return clause[:match.start()] + to_typable(clause[match.start():]) if match else clause


def _python_command() -> str:
    folder = os.path.dirname(sys.executable)
    return "python3" if os.path.dirname(shutil.which("python3") or "") == folder else sys.executable
