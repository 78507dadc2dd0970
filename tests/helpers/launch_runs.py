"""Start real runs for the launch tests, and find processes that they leave behind."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from places import TESTS
from slowness import scaled

CAPTURED = TESTS / "captured"
_FOREIGN = ("PBS_", "SLURM_", "PMI", "OMPI_", "MPI_", "EZPZ_LLM_", "MASTER_", "OMP_", "CUDA_VISIBLE", "ROCR_",
            "ZE_")
STALE = {"RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "6", "NODE_RANK": "8"}
"""Rank variables left over from an outer launcher or the shell."""
# Options of a training run that continues until it is stopped.
LONG = ["--n-layer", "1", "--n-embd", "32", "--n-head", "1", "--block-size", "32", "--eval-tokens", "512",
        "--eval-every", "0", "--sample-tokens", "0", "--save-every", "0", "--log-every", "5", "--precision", "fp32",
        "--profile", "false", "--steps", "100000"]

# On a signal, finishes its step and saves, as a trainer does. It prints all the time, so that it notices at once
# when the console has closed.
SAVES = """
import os, signal, sys, time
from pathlib import Path
signals = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: signals.append(1))
run, rank = Path(os.environ["EZPZ_LLM_RUN_DIR"]), os.environ["EZPZ_LLM_RANK"]
if rank == "0" and len(sys.argv) > 1:
    # A first checkpoint, which the post-mortem reports.
    (run / "checkpoints/step-1").mkdir(parents=True)
    (run / "checkpoints/latest").symlink_to("step-1")
(run / f"up{rank}").touch()
end = time.monotonic() + 60
while not signals and time.monotonic() < end:
    print("step", flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    time.sleep(0.02)
time.sleep(0.5)
print("saving", flush=True)
(run / f"saved{rank}").touch()
"""


def clean_env(**changes: str) -> dict[str, str]:
    """Return this environment without scheduler, ranks or devices, with this Python's programs first on PATH.

    EZPZ_LLM_CACHE is kept, since the cache holds DeepSpeed's compiled ops.
    """
    env = {name: value for name, value in os.environ.items()
           if name == "EZPZ_LLM_CACHE" or not name.startswith(_FOREIGN)}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return env | changes


def need_mpiexec() -> None:
    """Skip the test if there is no mpiexec on PATH or beside this Python, where launchers/with-env installs one."""
    places = os.pathsep.join((os.environ["PATH"], f"{sys.prefix}/bin", f"{sys.prefix}/mpi"))
    if shutil.which("mpiexec", path=places) is None:
        pytest.skip("mpiexec is not installed")


def captured_env(path: str) -> dict[str, str]:
    """Return the variables in the captured output of `env`."""
    lines = (CAPTURED / path).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def start(cwd: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    """Start `launch WORDS` in `cwd`."""
    return subprocess.Popen([sys.executable, "-m", "ezpz_llm.launch", *words], cwd=cwd, env=clean_env(**env),
                            text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def launch(cwd: Path, *words: str, timeout: float = 150, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `launch WORDS` to its end."""
    running = start(cwd, *words, **env)
    return finished(running, words, timeout, running.terminate)


def finished(running: subprocess.Popen[str], words: Sequence[str | Path], timeout: float,
             end: Callable[[], object]) -> subprocess.CompletedProcess[str]:
    """Wait for a process. After the timeout, call `end` and fail the test."""
    timeout = scaled(timeout)
    try:
        out, err = running.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end()
        out, err = running.communicate(timeout=scaled(120))
        raise AssertionError(f"{words} did not end within {timeout:.0f} s\n{out}\n{err}") from None
    return subprocess.CompletedProcess(words, running.returncode, out, err)


def cpu_seconds() -> float:
    """Return the processor time of this process and its ended children, which is independent of the load."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def record(run_dir: Path) -> dict:
    return json.loads((run_dir / "run.json").read_text())


def left_over(run_dir: Path) -> dict[int, str]:
    """Return process ids and command lines of the living processes marked with the id of the run in `run_dir`."""
    marker = record(run_dir)["launch"]["env"]["EZPZ_LLM_RUN_ID"].encode()
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (folder / "environ").read_bytes():
                processes[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return processes


def scheduler(folder: Path, name: str, script: str) -> Path:
    """Create a folder with a program `name` that runs `script` and appends its arguments to folder/calls."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >> {folder}/calls\n{script}\n')
    program.chmod(0o755)
    return folder
