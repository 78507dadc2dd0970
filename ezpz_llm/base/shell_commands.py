"""Commands in messages, as the user's shell finds them: launch, ezpz-llm, pip and python3 of this environment."""

from __future__ import annotations

import os
import re
import shutil
import sys

WITH_ENV_VARIABLE = "EZPZ_LLM_WITH_ENV"
"""launchers/with-env as it was typed, unless the shell that it was typed in finds launch by itself."""

# What stands between two commands. A command within a clause is a word of the first: submit … -- launch ….
_CLAUSES = re.compile(r"([(`\n]|[;:,] | or | and )")
_BEGIN = re.compile(r"(?<![\w./-])(?<!with-env )"
                    r"(?:launch (?=-|python3|\./|\[|…|COMMAND)|ezpz-llm (?=[a-z])|pip (?=install)"
                    r"|python3 (?=-m ezpz_llm\.))")


def typable(command: str) -> str:
    """Return a command that begins with `launch`, `ezpz-llm`, `pip` or `python3`, as this user has to type it."""
    word, _, rest = command.partition(" ")
    if typed := os.environ.get(WITH_ENV_VARIABLE):
        return f"{typed} {command}"
    if shutil.which("launch") is not None:
        return command
    # The environment's programs are not on PATH: its Python was started by its path, or finds us on PYTHONPATH.
    if rest.startswith("--version"):
        return command  # of ezpz-llm itself, which has no module to run
    python = _python()
    rest = re.sub(r"\bpython3 (?=-m ezpz_llm\.)", lambda _: f"{python} ", rest)
    module = {"launch": "-m ezpz_llm.launch", "pip": "-m pip", "python3": ""}.get(word)
    if word == "ezpz-llm":
        return f"{python} -m ezpz_llm.{rest}"
    return " ".join(filter(None, (python, module, rest))) if module is not None else command


def typable_text(text: str) -> str:
    """Return a text with the first command of each clause as `typable` returns it."""
    return "".join(_in_clause(clause) for clause in _CLAUSES.split(text))


def _in_clause(clause: str) -> str:
    found = _BEGIN.search(clause)
    return clause[:found.start()] + typable(clause[found.start():]) if found else clause


def _python() -> str:
    folder = os.path.dirname(sys.executable)
    return "python3" if os.path.dirname(shutil.which("python3") or "") == folder else sys.executable
