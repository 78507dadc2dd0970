"""First lines of a launch, as golden files at three terminal widths, and in a log."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from golden import check_golden
from launch_runs import captured_env
from slowness import scaled

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.jobs.option_parsing import parse
from ezpz_llm.launcher.planning.plan import LaunchPlan, build_plan
from ezpz_llm.launcher.planning.plan_text import opening_lines

NOTE = "the end of the job is not known: squeue is not on PATH, so that nothing is saved before the job ends"
_COMMAND = "python3 -m ezpz_llm.train"


def plans(folder: Path) -> dict[str, LaunchPlan]:
    """Return plans of launches on this machine and in a job."""
    for name, body in (("srun", "exit 1"), ("mpiexec", "echo HYDRA build details:")):
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    env = {"PATH": str(folder)}
    job = build_plan(parse(f"--ppn 4 {_COMMAND}".split()), captured_env("slurm/env_sbatch_script.txt") | env)
    here = build_plan(parse(f"-n 2 --hosts localhost {_COMMAND}".split()), env)
    return {"a laptop": here._replace(hosts=("laptop",), notes=()),
            "a job of two nodes": job._replace(notes=(NOTE,)),
            "a job of many nodes": job._replace(hosts=tuple(f"x3101c0s{number}b0n0" for number in range(64)),
                                           notes=())}


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_first_lines_of_a_launch_are_the_golden_ones(width: int, tmp_path: Path) -> None:
    run_dir = RunDir(Path("runs/train-20261124-001200"))
    text = "\n".join(f"{name}\n\n{opening_lines(plan._replace(run_dir=run_dir), width)}\n"
                     for name, plan in plans(tmp_path).items())
    check_golden(f"first_lines_{width}.txt", text)
    assert max(map(len, text.splitlines())) <= width


def test_lines_are_as_wide_as_the_terminal_and_whole_in_a_log(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ezpz_llm.launch", "--run-dir", "run", "-n", "1", "--hosts", "localhost",
               "true"]
    env = {**os.environ, "LOADL_STEP_ID": "c1.7.0", "COLUMNS": "", "LINES": ""}
    logged = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True,
                            timeout=scaled(60), check=True)
    note, = (line for line in logged.stderr.splitlines() if "LOADL_STEP_ID" in line)
    assert len(note) > 40
    console, terminal = pty.openpty()
    fcntl.ioctl(console, termios.TIOCSWINSZ, struct.pack("4H", 24, 40, 0, 0))
    run = subprocess.Popen(command, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, stdout=terminal,
                           stderr=terminal)
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: all writers have closed the terminal
        while data := os.read(console, 4096):
            shown += data
    os.close(console)
    assert run.wait(scaled(60)) == 0
    lines = shown.decode().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("note"))
    wrapped = [lines[begin], *(line for line in lines[begin + 1:] if line.startswith(" " * 11))]
    assert len(wrapped) > 1
    assert all(len(line) <= 40 for line in wrapped)
    assert " ".join(line[11:] for line in wrapped) == note[11:], "the same words"
