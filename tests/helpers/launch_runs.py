"""Start real runs for the launch tests, and look for what they leave behind."""

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
"""What an outer launcher, or the shell, has left of a rank's place."""
# A training that goes on until it is told to end.
LONG = ["--n-layer", "1", "--n-embd", "32", "--n-head", "1", "--block-size", "32", "--eval-tokens", "512",
        "--eval-every", "0", "--sample-tokens", "0", "--save-every", "0", "--log-every", "5", "--precision", "fp32",
        "--profile", "false", "--steps", "100000"]

# Saves as a trainer does: told to end, it finishes its step first. It talks all the time, so that a console that
# has gone is noticed at once.
SAVES = """
import os, signal, sys, time
from pathlib import Path
told = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: told.append(1))
run, rank = Path(os.environ["EZPZ_LLM_RUN_DIR"]), os.environ["EZPZ_LLM_RANK"]
if rank == "0" and len(sys.argv) > 1:
    # A first checkpoint, for the post-mortem's words.
    (run / "checkpoints/step-1").mkdir(parents=True)
    (run / "checkpoints/latest").symlink_to("step-1")
(run / f"up{rank}").touch()
end = time.monotonic() + 60
while not told and time.monotonic() < end:
    print("step", flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    time.sleep(0.02)
time.sleep(0.5)
print("saving", flush=True)
(run / f"saved{rank}").touch()
"""


def clean_env(**changes: str) -> dict[str, str]:
    """This environment without a scheduler, ranks or devices, with this Python's programs first on PATH.

    The cache stays: DeepSpeed's ops lie there.
    """
    env = {name: value for name, value in os.environ.items()
           if name == "EZPZ_LLM_CACHE" or not name.startswith(_FOREIGN)}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return env | changes


def need_mpiexec() -> None:
    """Skip the test where no mpiexec is on PATH or beside this Python, as launchers/with-env installs one."""
    places = os.pathsep.join((os.environ["PATH"], f"{sys.prefix}/bin", f"{sys.prefix}/mpi"))
    if shutil.which("mpiexec", path=places) is None:
        pytest.skip("there is no mpiexec")


def captured_env(path: str) -> dict[str, str]:
    """The variables that a captured `env` printed."""
    lines = (CAPTURED / path).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def start(cwd: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    """`launch WORDS`, running in `cwd`."""
    return subprocess.Popen([sys.executable, "-m", "ezpz_llm.launch", *words], cwd=cwd, env=clean_env(**env),
                            text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def launch(cwd: Path, *words: str, timeout: float = 150, **env: str) -> subprocess.CompletedProcess[str]:
    """`launch WORDS` to its end."""
    running = start(cwd, *words, **env)
    return finished(running, words, timeout, running.terminate)


def finished(running: subprocess.Popen[str], words: Sequence[str | Path], timeout: float,
             end: Callable[[], object]) -> subprocess.CompletedProcess[str]:
    """A process at its end; one that is not there in time is ended by `end`, and the test fails."""
    timeout = scaled(timeout)
    try:
        out, err = running.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end()
        out, err = running.communicate(timeout=scaled(120))
        raise AssertionError(f"{words} did not end within {timeout:.0f} s\n{out}\n{err}") from None
    return subprocess.CompletedProcess(words, running.returncode, out, err)


def cpu_seconds() -> float:
    """Processor time of this process and its ended children so far: what is quick is so on a busy machine too."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in spent)


def record(run_dir: Path) -> dict:
    return json.loads((run_dir / "run.json").read_text())


def left_over(run_dir: Path) -> dict[int, str]:
    """The living processes that carry the marker of the run in `run_dir`, with their command lines."""
    marker = record(run_dir)["launch"]["env"]["EZPZ_LLM_RUN_ID"].encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def scheduler(folder: Path, name: str, script: str) -> Path:
    """A folder with a program `name` that runs the lines of `script`; it notes its arguments in folder/calls."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >> {folder}/calls\n{script}\n')
    program.chmod(0o755)
    return folder
