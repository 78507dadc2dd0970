"""Suggested commands in messages, in a form that works in the user's shell."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.base.shell_commands import WITH_ENV_VARIABLE, to_typable, to_typable_text

TYPED = "./launchers/with-env"


@pytest.mark.parametrize(("text", "shown"), [
    ("launch --dry-run --json …", "W launch --dry-run --json …"),
    ("launch -n 1, or ezpz-llm evaluate harness …", "W launch -n 1, or W ezpz-llm evaluate harness …"),
    ("another --study, or ezpz-llm scale --study D", "another --study, or W ezpz-llm scale --study D"),
    ("as many ranks (launch --explain shows them)", "as many ranks (W launch --explain shows them)"),
    ("pip install 'ezpz_llm[hf]', or name a folder", "W pip install 'ezpz_llm[hf]', or name a folder"),
    ("ezpz-llm submit --time 1:00:00 -- launch python3 -m ezpz_llm.train",
     "W ezpz-llm submit --time 1:00:00 -- launch python3 -m ezpz_llm.train"),
    ("CUDA_LAUNCH_BLOCKING=1 launch … names the line", "CUDA_LAUNCH_BLOCKING=1 W launch … names the line"),
    ("make one with: python3 -m ezpz_llm.data prepare C", "make one with: W python3 -m ezpz_llm.data prepare C"),
    ("the folder in which launch was typed", "the folder in which launch was typed"),
    ("W ezpz-llm report --help", "W ezpz-llm report --help")])
def test_each_command_of_a_text_begins_with_with_env_as_typed(text, shown, monkeypatch):
    monkeypatch.setenv(WITH_ENV_VARIABLE, TYPED)
    assert to_typable_text(text.replace("W ", f"{TYPED} ")) == shown.replace("W ", f"{TYPED} ")
    monkeypatch.delenv(WITH_ENV_VARIABLE)
    assert to_typable_text(text) == text


def test_modules_are_run_by_python_if_launch_is_not_on_path(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    python = sys.executable
    assert to_typable("launch -n 2 python3 -m ezpz_llm.train") == (
        f"{python} -m ezpz_llm.launch -n 2 {python} -m ezpz_llm.train")
    assert to_typable("ezpz-llm scale report D") == f"{python} -m ezpz_llm.scale report D"
    assert to_typable("pip install ninja") == f"{python} -m pip install ninja"
    assert to_typable("python3 -m ezpz_llm.train") == f"{python} -m ezpz_llm.train"


def test_remedy_of_an_error_is_typable(monkeypatch):
    monkeypatch.setenv(WITH_ENV_VARIABLE, TYPED)
    error = UserError("launch -n 3", where="launch --run-dir a", instead="launch -n 2")
    assert str(error) == f"launch -n 3\n  where:   launch --run-dir a\n  instead: {TYPED} launch -n 2"


@pytest.mark.parametrize(("words", "shown"), [
    (("ezpz-llm", "report", "--x"), f"{TYPED} ezpz-llm report --help lists"),
    (("ezpz-llm", "submit"), f"instead: {TYPED} ezpz-llm submit --nodes 4"),
    (("ezpz-llm", "generate", "--help"), f"{TYPED} launch -n 2 python3 -m ezpz_llm.generate"),
    (("launch", "--json", "x"), f"instead: {TYPED} launch --dry-run --json"),
    (("launch", "--help"), f"usage: {TYPED} launch [options]"),
    (("python3", "-m", "ezpz_llm.train", "--help"), f"usage: {TYPED} python3 -m ezpz_llm.train [options]"),
    (("python3", "-m", "ezpz_llm.scale", "report", "--help"), f"usage: {TYPED} python3 -m ezpz_llm.scale report")])
def test_commands_started_by_with_env_suggest_it(words, shown):
    done = subprocess.run(words, capture_output=True, text=True, timeout=scaled(60), check=False,
                          env={**os.environ, WITH_ENV_VARIABLE: TYPED, "COLUMNS": "200"})
    assert shown in done.stdout + done.stderr
