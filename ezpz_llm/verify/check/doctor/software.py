"""Software checks of doctor: Python, torch and drivers, DeepSpeed and its ops, MPI, compiler, py-spy, clock."""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ezpz_llm.core.base import UserError, extensions_dir, installed, parse_json
from ezpz_llm.core.rundir.records import Finding
from ezpz_llm.launcher.basics.devices import visible_devices
from ezpz_llm.launcher.planning.dialects import choose_launcher
from ezpz_llm.training.layout.ops import OPS, building_dir, is_built, ops_dir
from ezpz_llm.verify.check.findings import first_problem
from ezpz_llm.verify.check.node_facts import drivers, mpi_library, torch_build

_MIN_PYTHON, _MIN_TORCH, _DEEPSPEED = (3, 10), (2, 6), ((0, 17, 6), (0, 20))
_TRAINER = ("deepspeed", "jsonargparse")
"""Packages that only the trainer needs. If none is installed, ezpz_llm was installed without its extra "train"."""
_BUILDS = {"cuda": ("CUDA", "NVIDIA"), "hip": ("ROCm", "AMD"), "xpu": ("XPU", "Intel")}
_DEVICES_TIMEOUT_S = 60
_LIST_DEVICES = """
import json, torch
seen = [module for module in (torch.cuda, torch.xpu) if module.is_available()]
names = [module.get_device_name(i) for module in seen for i in range(module.device_count())]
print(json.dumps(names or (["Apple GPU"] if torch.backends.mps.is_available() else [])))
"""


def software_checks(env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings for Python, devices, and those of torch, DeepSpeed and MPI that should be installed."""
    yield _check_python()
    build, loaded, library = torch_build(), drivers(), mpi_library()
    has_trainer = any(map(installed, _TRAINER))
    if not has_trainer:
        yield Finding("ok", "trainer", "not installed; this installation only launches",
                      "pip install 'ezpz_llm[train]' to train, or run the command with launchers/with-env")
    if has_trainer or build:
        yield check_torch(build, loaded, _cuda_of_driver())
    if has_trainer:
        yield check_package("deepspeed", *_DEEPSPEED)
    yield check_devices(env, build)
    if has_trainer or library:
        yield check_mpi(library, _mpiexec(env))


def _check_python() -> Finding:
    """Check the version of Python."""
    text = f"{platform.python_version()} ({sys.executable})"
    return first_problem("python", text, (sys.version_info[:2] < _MIN_PYTHON, "bad",
                                          "use Python 3.10 or newer: load its module, or set EZPZ_PYTHON"))


def check_torch(build: Mapping[str, str], loaded: Mapping[str, str],
                driver_cuda: tuple[int, int] | None) -> Finding:
    """Check that the drivers of this machine support the installed torch build.

    Args:
        driver_cuda: newest CUDA version that the NVIDIA driver supports; None if there is no driver.
    """
    if not build:
        return Finding("bad", "torch", "not installed",
                       "run the command with launchers/with-env, which finds or installs torch "
                       "(docs/use/install.md)")
    versions = [f"{name} {build[key]}" for key, (name, _) in _BUILDS.items() if key in build]
    text = f"{build['version']}, built for {' and '.join(versions) or 'CPU'}"
    makers = {maker for key, (_, maker) in _BUILDS.items() if key in build}
    is_too_new = "cuda" in build and driver_cuda is not None and _numbers(build["cuda"])[:1] > driver_cuda[:1]
    is_other = bool(loaded) and not makers & loaded.keys()
    machine = "this machine has " * is_other + ", ".join(f"{maker} driver {number}"
                                                         for maker, number in loaded.items())
    if driver_cuda is not None and is_too_new:
        machine = f"the driver supports CUDA up to {driver_cuda[0]}.{driver_cuda[1]}"
    elif makers and not loaded:
        machine = "this machine has no driver for it"
    return first_problem(
        "torch", "; ".join(filter(None, (text, machine))),
        (_numbers(build["version"]) < _MIN_TORCH, "bad",
         "use torch 2.6 or newer: load a newer module, or set EZPZ_LLM_TORCH"),
        (is_other, "bad",
         "use a torch built for this driver: set EZPZ_LLM_TORCH for launchers/with-env (docs/use/install.md)"),
        (is_too_new, "bad", "use a torch built for an older CUDA, or update the driver"),
        (bool(makers) and not loaded, "warn", "expected only on a login node"))


def _cuda_of_driver() -> tuple[int, int] | None:
    """Return the newest CUDA version that the loaded NVIDIA driver supports (cuDriverGetVersion: 12040 is 12.4)."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0 or not number.value:
        return None
    return number.value // 1000, number.value % 1000 // 10


def check_package(name: str, least: tuple[int, ...], below: tuple[int, ...]) -> Finding:
    """Check that a package is installed in a tested version."""
    version, requirement = installed(name), f"{name}>={'.'.join(map(str, least))},<{'.'.join(map(str, below))}"
    return first_problem(name, version or "not installed",
                         (version is None, "bad",
                          f"pip install '{requirement}', or run the command with launchers/with-env"),
                         (not least <= _numbers(version or "") < below, "warn",
                          f"pip install '{requirement}'; other versions are untested"))


def check_devices(env: Mapping[str, str], build: Mapping[str, str]) -> Finding:
    """Report the visible devices and check that torch can use them.

    Imports torch only if there may be devices, and in a subprocess, because drivers can hang.
    """
    visible = visible_devices(env)
    text = f"{len(visible.ids)} visible ({visible.source})" if visible.ids else f"none ({visible.source})"
    if not build or (not visible.ids and sys.platform != "darwin"):
        return Finding("ok", "devices", text)
    try:
        result = subprocess.run([sys.executable, "-c", _LIST_DEVICES], capture_output=True, text=True, check=False,
                                timeout=_DEVICES_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return Finding("bad", "devices", f"{text}; torch hangs when it queries them",
                       "check the driver (dmesg, nvidia-smi, rocm-smi), or use another node")
    names = parse_json(result.stdout.splitlines()[-1], "torch") if result.returncode == 0 else []
    if names:
        return Finding("ok", "devices", ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)))
    reason = "".join(f": {line}" for line in result.stderr.strip().splitlines()[-1:])
    return Finding("warn", "devices", f"{text}, but torch finds none{reason}",
                   "install a torch built for these devices, unless the mask hides them intentionally")


def check_mpi(library: str | None, dialect: str | None) -> Finding:
    """Check that mpi4py's MPI library matches the mpiexec that launch would use."""
    if library is None:
        return Finding("warn", "MPI library", "mpi4py is not installed or cannot load an MPI library",
                       "load the site's MPI module or pip install mpich, if a program needs MPI")
    # MPICH, Intel MPI and Cray MPICH share a start-up protocol (PMI). Open MPI's ranks need Open MPI's mpiexec.
    if dialect is not None and ("open mpi" in library.lower()) != dialect.startswith("Open MPI"):
        return Finding("bad", "MPI library", f"mpi4py loads {library}, but mpiexec is {dialect}",
                       "put the mpiexec of that library first on PATH, or set MPI4PY_LIBMPI to the library of this "
                       "mpiexec; otherwise each rank would be alone in its own MPI world (rank 0 of 1)")
    return Finding("ok", "MPI library", library)


def _mpiexec(env: Mapping[str, str]) -> str | None:
    try:
        return choose_launcher("mpiexec", "", 2, env).title
    except UserError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = "".join(character for character in part if character.isdigit())
        if not digits or not part[0].isdigit():
            break
        numbers.append(int(digits))
    return tuple(numbers)


_UNSYNCHRONIZED = 0x40
_STATUS_OFFSET = 40
"""Offset of `status` in struct timex on 64-bit Linux, for STA_UNSYNC of adjtimex(2)."""
_EARLIEST = 1.7e9
"""Unix time in November 2023. A clock that shows an earlier time is wrong."""


def tool_checks(env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings for compiler, ops, build locks, py-spy and clock."""
    if build := torch_build():
        yield check_compiler(env)
    if build and installed("deepspeed"):
        yield from map(_check_op, OPS)
    for lock in _stale_locks(env):
        yield Finding("warn", "stale lock", f"{lock}: builds of this op would wait forever",
                      f"rm {shlex.quote(str(lock))}")
    yield _py_spy_finding()
    yield check_clock(time.time(), is_clock_synchronized())


def _check_op(name: str) -> Finding:
    """Check that one of DeepSpeed's ops is built."""
    built = is_built(name)
    return first_problem(f"op {name}", f"built for this machine ({ops_dir()})" if built else "not built",
                         (not built, "warn", f"for layouts with offload, run ezpz-llm doctor --build-ops {name}"))


def check_compiler(env: Mapping[str, str]) -> Finding:
    """Check the C++ compiler and ninja, which build ops and torch.compile's kernels."""
    name = env.get("CXX", "c++")
    path, ninja = shutil.which(name, path=env.get("PATH")), _find_program("ninja")
    return first_problem("compiler", f"{path or f'no C++ compiler ({name})'}, {ninja or 'no ninja'}",
                         (path is None, "warn",
                          "install g++, load its module or set CXX, for DeepSpeed's ops and torch.compile"),
                         (ninja is None, "warn", "pip install ninja, for DeepSpeed's ops"))


def _stale_locks(env: Mapping[str, str]) -> list[Path]:
    """Return the locks of killed compilations in ezpz_llm's and torch's caches, for which builds would wait."""
    from ezpz_llm.training.layout.ops import lock_holder

    places = [building_dir()] if torch_build() and installed("deepspeed") else []
    if chosen := env.get("TORCH_EXTENSIONS_DIR"):
        places.append(Path(chosen))
    else:
        places += sorted((*extensions_dir().glob("*"), *(Path.home() / ".cache" / "torch_extensions").glob("*")))
    return [lock for place in places for lock in sorted(place.glob("*/lock")) if lock_holder(lock) is None]


def _py_spy_finding() -> Finding:
    """Report py-spy, which shows the stacks of a hanging rank."""
    return Finding("ok", "py-spy", _find_program("py-spy") or "not installed: Python's faulthandler shows the "
                                                             "stacks of a hanging rank instead")


def check_clock(now: float, is_synchronized: bool | None) -> Finding:
    """Check this machine's time. `is_synchronized` is None if unknown."""
    text = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now)) + " UTC"
    suffix = ", not synchronized by chrony or ntpd on this machine" if is_synchronized is False else ""
    return first_problem("clock", text + suffix, (now < _EARLIEST, "bad",
                                                  "set it: otherwise TLS certificates may be rejected, and log "
                                                  "times and the remaining job time are wrong"))


def is_clock_synchronized() -> bool | None:
    """Return whether adjtimex(2) reports that the clock is synchronized; None if unknown. Read-only."""
    try:
        state = ctypes.create_string_buffer(256)
        answer = ctypes.CDLL(None).adjtimex(state)
    except (OSError, AttributeError):
        return None
    if answer < 0:
        return None
    status = int.from_bytes(state.raw[_STATUS_OFFSET:_STATUS_OFFSET + 4], sys.byteorder)
    return not status & _UNSYNCHRONIZED


def _find_program(program: str) -> str | None:
    """Return the path of a program on PATH or next to this Python."""
    return shutil.which(program) or shutil.which(program, path=os.path.dirname(sys.executable))
