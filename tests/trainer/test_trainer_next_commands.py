"""Commands that a run prints at its end."""

from __future__ import annotations

import pytest

from ezpz_llm.training.trainer.next_commands import program


@pytest.mark.parametrize(("command", "again"), [
    ("/usr/bin/python3 -m ezpz_llm.train --steps 9", "python3 -m ezpz_llm.train"),
    ("python3 -u mine.py --steps 9", "python3 mine.py"), ("python3.12 /a/mine.py", "python3 /a/mine.py"),
    ("/opt/bin/ezpz-llm train --steps 9", "python3 -m ezpz_llm.train")])
def test_the_command_that_resumes_runs_the_same_program(command: str, again: str) -> None:
    assert program(command.split()) == again
