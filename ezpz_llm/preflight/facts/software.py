"""Versions: of Python and its packages, of torch's build without importing it, of the kernel and the drivers."""

from __future__ import annotations

import ast
import importlib.util
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = ("deepspeed", "numpy", "mpi4py", "ezpz_llm")
_DRIVERS = {"NVIDIA": Path("/sys/module/nvidia/version"), "AMD": Path("/sys/module/amdgpu/version"),
            "Intel": Path("/sys/module/xe/version")}
_MPI_QUESTION = ("import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
                 "print(MPI.Get_library_version())")
_MPI_TIMEOUT_S = 20


def versions() -> dict[str, str]:
    """Name to version of everything that should be the same on every node; what is absent is left out."""
    found = {"python": platform.python_version(), "torch": torch_build().get("version"),
             **{package: installed(package) for package in PACKAGES},
             "kernel": platform.release(), **{f"{name} driver": version for name, version in drivers().items()}}
    return {name: version for name, version in found.items() if version}


def installed(package: str) -> str | None:
    """The version of an installed package; None without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def torch_build() -> dict[str, str]:
    """`version` (with the build, such as +cpu) and what it was built for (`cuda`, `hip`, `xpu`: their versions),
    from torch's own version file; empty without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    path = Path(spec.origin).with_name("version.py")
    values = _assigned(path) if path.is_file() else {}
    found = {"version": values.get("__version__") or installed("torch")}
    found |= {name: values.get(name) for name in ("cuda", "hip", "xpu")}
    return {name: value for name, value in found.items() if value}


def _assigned(path: Path) -> dict[str, str]:
    """The names that a module assigns a text to."""
    found = {}
    for line in ast.parse(path.read_text()).body:
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        value = getattr(line, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found |= {target.id: value.value for target in targets if isinstance(target, ast.Name)}
    return found


def drivers() -> dict[str, str]:
    """Accelerator makers to the version of the driver that the kernel has loaded."""
    found = {}
    for maker, path in _DRIVERS.items():
        if path.is_file():
            found[maker] = path.read_text().strip()
    return found


def mpi_library() -> str | None:
    """The first line in which the MPI library that mpi4py loads says what it is; None where it loads none.

    Asked in a process of its own: a library that does not fit can end the process that loads it.
    """
    if installed("mpi4py") is None:
        return None
    try:
        done = subprocess.run([sys.executable, "-c", _MPI_QUESTION], capture_output=True, text=True, check=False,
                              timeout=_MPI_TIMEOUT_S, stdin=subprocess.DEVNULL, env=_without_ranks())
    except (OSError, subprocess.TimeoutExpired):
        return None
    return first_line(done.stdout) if done.returncode == 0 else None


def first_line(text: str) -> str | None:
    """The first line with anything on it, blanks folded."""
    return next((" ".join(line.split()) for line in text.splitlines() if line.strip()), None)


def _without_ranks() -> dict[str, str]:
    # The question must not take part in a launch that is going on.
    return {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "PALS_", "OMPI_"))}
