"""Control characters in text from files, nodes, and other processes never reach the terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launch_runs import clean_env, launch
from slowness import scaled

from ezpz_llm.core.base.errors import UserError, escape_control_characters
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.relay import print_stderr
from ezpz_llm.training.observe.tables import table

EVIL = "\x1b]0;PWNED\x07\x1b[31mevil\x9b2J\r\x08\u202e"


def has_no_control_characters(text: str) -> bool:
    return not any((character < " " and character not in "\n\t") or "\x80" <= character < "\xa0"
                   or character == "\u202e" for character in text)


def test_colors_are_removed_and_other_control_characters_escaped() -> None:
    assert escape_control_characters("a\x1b[31;1mb\x1b[0m") == "ab"
    assert escape_control_characters(EVIL) == "\\x1b]0;PWNED\\x07evil\\x9b2J\\r\\x08\\u202e"
    assert escape_control_characters("déjà\tvu\n日本") == "déjà\tvu\n日本"
    # Removing a color must not create another one.
    assert has_no_control_characters(escape_control_characters("\x1b\x1b[31m[31m\x1b["))


def test_errors_console_and_tables_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    error = UserError(f"no host {EVIL}", where=EVIL, instead=EVIL)
    assert has_no_control_characters(str(error))
    assert "PWNED" in str(error)
    print_stderr(f"host {EVIL}")
    assert has_no_control_characters(capsys.readouterr().err)
    assert has_no_control_characters(table("t", ["a", EVIL], [[EVIL, "1"]]))


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31m", "a\tb", "a\x9bb"])
def test_run_directory_with_control_characters_is_rejected(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="control characters"):
        RunDir(tmp_path / name)
    done = launch(tmp_path, "-n", "1", "--run-dir", name, "true")
    assert done.returncode == 2
    assert has_no_control_characters(done.stdout + done.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("why",), ("report",), ("explain",), ("checkpoint", "inspect")])
def test_record_of_another_user_is_cleaned_on_the_terminal(words: tuple[str, ...], tmp_path: Path) -> None:
    """Hostnames, causes, layouts, and settings may contain control characters."""
    launched = {"typed": ["launch", EVIL], "argv": [EVIL], "command": [EVIL], "scheduler": EVIL, "job_id": EVIL,
                "hosts": [EVIL], "ranks_per_host": [1], "launcher": EVIL, "dialect": EVIL, "world_size": 1,
                "env": {"EZPZ_LLM_RUN_ID": EVIL}, "started": 1.0}
    (tmp_path / "run.json").write_text(json.dumps({
        "launch": launched, "exit": {"code": 1, "cause": EVIL, "kind": "not started", "ended": 2.0, "rank": 0},
        "layout": EVIL, "config": {EVIL: EVIL}, "name": EVIL}))
    (tmp_path / "metrics.jsonl").write_text("".join(
        json.dumps({"step": step, "loss": 1.0, "tokens": step, "time": 1.0, EVIL: EVIL}) + "\n"
        for step in range(1, 4)))
    done = subprocess.run([sys.executable, "-m", f"ezpz_llm.{words[0]}", *words[1:], str(tmp_path)],
                          env=clean_env(), capture_output=True, text=True, timeout=scaled(60), check=False)
    assert has_no_control_characters(done.stdout + done.stderr), ascii(done.stdout + done.stderr)
    assert done.stdout + done.stderr
