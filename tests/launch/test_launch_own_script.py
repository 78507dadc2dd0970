"""A user's script under launch: closing line, response to Ctrl-C, stacks, and report."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_runs import SAVES, clean_env, start
from slowness import scaled

from ezpz_llm.launcher.basics.processes import Process
from ezpz_llm.launcher.basics.relay import print_unless_blocked
from ezpz_llm.launcher.basics.variables import STACKS_SIGNAL, STACKS_VARIABLE
from ezpz_llm.launcher.on_nodes.node.rank_reports import format_stacks

LINES = """
import json, os
for step in range(1, 31):
    with open(os.path.join(os.environ["EZPZ_LLM_RUN_DIR"], "metrics.jsonl"), "a") as file:
        file.write(json.dumps({"step": step, "loss": 3 - step / 30}) + "\\n")
"""


def test_a_good_end_has_a_line_and_its_own_lines_are_drawn(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    running = start(tmp_path, "-n", "1", "--run-dir", str(run_dir), sys.executable, "-c", LINES)
    out, err = running.communicate(timeout=scaled(60))
    assert running.returncode == 0, out + err
    assert re.search(rf"launch: exit code 0 after \d:\d\d:\d\d, run directory {run_dir}\n$", err)
    done = subprocess.run([sys.executable, "-m", "ezpz_llm.report", str(run_dir)], capture_output=True, text=True,
                          env=clean_env(COLUMNS="80"), timeout=scaled(60), check=False)
    assert "loss (nats/token) over step" in done.stdout, done.stderr
    assert "nothing to draw" not in done.stdout


def test_the_report_of_a_script_without_lines_says_how_to_write_some(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"exit": {"code": 0, "cause": "all ranks succeeded"}}))
    done = subprocess.run([sys.executable, "-m", "ezpz_llm.report", str(tmp_path)], capture_output=True, text=True,
                          timeout=scaled(60), check=False)
    assert done.returncode == 2
    assert "the run wrote no steps" in done.stderr
    assert "ezpz_llm.record(step, loss=…)" in done.stderr


def test_ctrl_c_is_answered_before_the_ranks_have_ended(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    running = start(tmp_path, "-n", "1", "--run-dir", str(run_dir), sys.executable, "-c", SAVES)
    deadline = time.monotonic() + scaled(60)
    while not (run_dir / "up0").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith("launch: SIGINT: "):
            break
    assert line == "launch: SIGINT: stopping all ranks with SIGTERM (within 10 s); press ^C again to stop now\n"
    assert not (run_dir / "saved0").exists(), "it answers before it waits"
    running.communicate(timeout=scaled(60))
    assert running.returncode == 130
    assert (run_dir / "saved0").exists()


def test_a_console_that_takes_nothing_holds_no_stop_up() -> None:
    full = """
import os, sys
os.set_blocking(2, False)
try:
    while True:
        os.write(2, b"x" * 4096)
except BlockingIOError:
    pass
os.set_blocking(2, True)
from ezpz_llm.launcher.basics.relay import print_unless_blocked
print_unless_blocked("stopping")
os.write(1, b"on")
"""
    running = subprocess.Popen([sys.executable, "-c", full], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert running.wait(scaled(30)) == 0
    finally:
        running.kill()
        running.communicate()


def test_a_console_that_reads_gets_the_line(capfd: pytest.CaptureFixture[str]) -> None:
    print_unless_blocked("stopping")
    assert capfd.readouterr().err == "stopping\n"


def test_what_a_program_without_a_python_stack_has_to_add_gives_one(tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the lines that the stacks file recommends, and check that the program's stack is recorded."""
    def stacks_of(program: str) -> str:
        hangs = [sys.executable, "-c", f"{program}\nprint(flush=True)\nimport time\ndef stuck():\n"
                 "    time.sleep(600)\nstuck()"]
        running = subprocess.Popen(hangs, env={STACKS_VARIABLE: str(tmp_path / "stacks")}, stdout=subprocess.PIPE)
        try:
            assert running.stdout is not None
            running.stdout.readline()
            process = Process(running.pid, os.getpid(), 0, rank=0, is_of_rank=True, is_shim=False, state="S",
                              processor_s=0.0)
            return format_stacks("rank 0", [process], tmp_path / "stacks")
        finally:
            running.kill()
            running.communicate()

    monkeypatch.setattr("ezpz_llm.launcher.on_nodes.node.rank_reports._stack_from_py_spy", lambda pid: None)
    without = stacks_of("")
    assert "pip install py-spy" in without
    program = "\n".join(line.strip() for line in without.split("add to the program:")[1].splitlines())
    assert f"faulthandler.register({STACKS_SIGNAL}," in program
    assert 'File "<string>", line ' in stacks_of(program)
