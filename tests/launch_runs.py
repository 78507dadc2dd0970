"""How the launch tests start real runs and look for what they leave behind."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CAPTURED = Path(__file__).parent / "captured"
_FOREIGN = ("PBS_", "SLURM_", "PMI", "OMPI_", "MPI_", "EZPZ_LLM_", "MASTER_", "OMP_", "CUDA_VISIBLE", "ROCR_",
            "ZE_")


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
    try:
        out, err = running.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        running.terminate()
        out, err = running.communicate(timeout=120)
        raise AssertionError(f"launch {words} did not end within {timeout} s\n{out}\n{err}") from None
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
