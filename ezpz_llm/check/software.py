"""Checks of the software: Python, torch against the driver, DeepSpeed and its ops, MPI, compilers, py-spy."""

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

from ezpz_llm.base import UserError, extensions_dir, installed, parse_json
from ezpz_llm.check.facts import drivers, mpi_library, torch_build
from ezpz_llm.check.judge.gathered import Finding, judged
from ezpz_llm.launch.devices import visible_devices
from ezpz_llm.launch.dialects import choose
from ezpz_llm.layout.ops import OPS, building_dir, is_built, ops_dir

_LEAST_PYTHON, _LEAST_TORCH, _DEEPSPEED = (3, 10), (2, 6), ((0, 17, 6), (0, 20))
_BUILDS = {"cuda": ("CUDA", "NVIDIA"), "hip": ("ROCm", "AMD"), "xpu": ("XPU", "Intel")}
_DEVICES_TIMEOUT_S = 60
_DEVICES_SEEN = """
import json, torch
seen = [module for module in (torch.cuda, torch.xpu) if module.is_available()]
names = [module.get_device_name(i) for module in seen for i in range(module.device_count())]
print(json.dumps(names or (["Apple GPU"] if torch.backends.mps.is_available() else [])))
"""


def software_checks(env: Mapping[str, str]) -> Iterator[Finding]:
    """The lines about software."""
    yield python()
    build, loaded = torch_build(), drivers()
    yield torch_check(build, loaded, cuda_of_driver())
    yield package("deepspeed", *_DEEPSPEED)
    yield devices(env, build)
    yield mpi(mpi_library(), _mpiexec(env))


def python() -> Finding:
    """This Python."""
    found = f"{platform.python_version()} ({sys.executable})"
    return judged("python", found, (sys.version_info[:2] < _LEAST_PYTHON, "bad",
                                    "Python 3.10 or newer: load its module, or set EZPZ_PYTHON"))


def torch_check(build: Mapping[str, str], loaded: Mapping[str, str],
                driver_cuda: tuple[int, int] | None) -> Finding:
    """torch, what it was built for, and whether the drivers of this machine can run that.

    Args:
        driver_cuda: the newest CUDA that NVIDIA's driver knows; None without the driver.
    """
    if not build:
        return Finding("bad", "torch", "not installed",
                       "launchers/with-env finds or installs one (docs/use/install.md)")
    versions = [f"{name} {build[key]}" for key, (name, _) in _BUILDS.items() if key in build]
    found = f"{build['version']}, built for {' and '.join(versions) or 'CPU'}"
    makers = {maker for key, (_, maker) in _BUILDS.items() if key in build}
    is_newer = "cuda" in build and driver_cuda is not None and _numbers(build["cuda"])[:1] > driver_cuda[:1]
    is_other = bool(loaded) and not makers & loaded.keys()
    here = "this machine has " * is_other + ", ".join(f"{maker} driver {text}" for maker, text in loaded.items())
    if driver_cuda is not None and is_newer:
        here = f"the driver knows CUDA up to {driver_cuda[0]}.{driver_cuda[1]}"
    elif makers and not loaded:
        here = "this machine has no such driver"
    return judged(
        "torch", "; ".join(filter(None, (found, here))),
        (_numbers(build["version"]) < _LEAST_TORCH, "bad",
         "torch 2.6 or newer: load a newer module, or set EZPZ_LLM_TORCH"),
        (is_other, "bad",
         "a torch built for that: EZPZ_LLM_TORCH names one for launchers/with-env (docs/use/install.md)"),
        (is_newer, "bad", "a torch built for an older CUDA, or a newer driver"),
        (bool(makers) and not loaded, "warn", "right for a login node only"))


def cuda_of_driver() -> tuple[int, int] | None:
    """The newest CUDA version that the loaded NVIDIA driver supports (cuDriverGetVersion: 12040 is 12.4)."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0 or not number.value:
        return None
    return number.value // 1000, number.value % 1000 // 10


def package(name: str, least: tuple[int, ...], below: tuple[int, ...]) -> Finding:
    """An installed package and whether its version is one of those that are tested."""
    found, wanted = installed(name), f"{name}>={'.'.join(map(str, least))},<{'.'.join(map(str, below))}"
    return judged(name, found or "not installed",
                  (found is None, "bad", f"pip install '{wanted}', or run in launchers/with-env"),
                  (not least <= _numbers(found or "") < below, "warn",
                   f"pip install '{wanted}': others are not tested"))


def devices(env: Mapping[str, str], build: Mapping[str, str]) -> Finding:
    """What is visible, and what torch makes of it. torch is asked only where there may be something to see, and in
    a process of its own: a driver can hang."""
    visible = visible_devices(env)
    found = f"{len(visible.ids)} visible ({visible.source})" if visible.ids else f"none ({visible.source})"
    if not build or (not visible.ids and sys.platform != "darwin"):
        return Finding("ok", "devices", found)
    try:
        done = subprocess.run([sys.executable, "-c", _DEVICES_SEEN], capture_output=True, text=True, check=False,
                              timeout=_DEVICES_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return Finding("bad", "devices", f"{found}; torch hangs when it asks for them",
                     "look at the driver (dmesg, nvidia-smi, rocm-smi), or take another node")
    names = parse_json(done.stdout.splitlines()[-1], "torch") if done.returncode == 0 else []
    if names:
        return Finding("ok", "devices", ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)))
    why = (done.stderr.strip().splitlines() or ["torch sees none of them"])[-1]
    return Finding("warn", "devices", f"{found}, but torch sees none: {why}",
                 "right where the mask hides them on purpose; else a torch built for them")


def mpi(library: str | None, dialect: str | None) -> Finding:
    """Do mpi4py's library and the mpiexec that launch would take belong together?"""
    if library is None:
        return Finding("warn", "MPI library", "mpi4py loads none",
                     "only programs that use MPI need one: load the site's MPI module, or pip install mpich")
    # MPICH, Intel MPI and Cray's share one start-up protocol (PMI); Open MPI's ranks need Open MPI's mpiexec.
    if dialect is not None and ("open mpi" in library.lower()) != dialect.startswith("Open MPI"):
        return Finding("bad", "MPI library", f"mpi4py loads {library}, but mpiexec is {dialect}",
                     "ranks that use MPI would each be rank 0 of 1: put the mpiexec of that library first on PATH, "
                     "or name its own library in MPI4PY_LIBMPI")
    return Finding("ok", "MPI library", library)


def _mpiexec(env: Mapping[str, str]) -> str | None:
    try:
        return choose("mpiexec", "", 2, env).dialect
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


# Compilers and DeepSpeed's ops, py-spy, the clock.
_UNSYNCHRONISED = 0x40
_STATUS_AT = 40
"""adjtimex(2): STA_UNSYNC, and where `status` stands in struct timex on 64-bit Linux."""
_EARLIEST = 1.7e9


def tool_checks(env: Mapping[str, str]) -> Iterator[Finding]:
    """The lines about tools that a run may need."""
    yield compiler(env)
    if torch_build() and installed("deepspeed"):
        yield from map(op, OPS)
    for lock in stale_locks(env):
        yield Finding("warn", "stale lock", f"{lock}: builds of that op would wait for ever",
                    f"rm {shlex.quote(str(lock))}")
    yield py_spy()
    yield clock(time.time(), clock_is_kept())


def op(name: str) -> Finding:
    """One of DeepSpeed's ops that layouts need."""
    built = is_built(name)
    return judged(f"op {name}", f"built for this machine ({ops_dir()})" if built else "not built",
                  (not built, "warn", f"ezpz-llm doctor --build-ops {name}, for layouts that offload"))


def compiler(env: Mapping[str, str]) -> Finding:
    """What builds ops and torch.compile's kernels."""
    wanted = env.get("CXX", "c++")
    found, ninja = shutil.which(wanted, path=env.get("PATH")), _beside("ninja")
    return judged("compiler", f"{found or f'no C++ compiler ({wanted})'}, {ninja or 'no ninja'}",
                  (found is None, "warn",
                   "install g++, load its module or set CXX: only DeepSpeed's ops and torch.compile need it"),
                  (ninja is None, "warn", "pip install ninja, for DeepSpeed's ops"))


def stale_locks(env: Mapping[str, str]) -> list[Path]:
    """Locks of compilations that no process works on: in our cache, and in torch's own, where others would wait."""
    from ezpz_llm.layout.ops import lock_holder

    places = [building_dir()] if torch_build() and installed("deepspeed") else []
    if chosen := env.get("TORCH_EXTENSIONS_DIR"):
        places.append(Path(chosen))
    else:
        places += sorted((*extensions_dir().glob("*"), *(Path.home() / ".cache" / "torch_extensions").glob("*")))
    return [lock for place in places for lock in sorted(place.glob("*/lock")) if lock_holder(lock) is None]


def py_spy() -> Finding:
    """What shows where a hanging rank stands."""
    return Finding("ok", "py-spy", _beside("py-spy") or "not installed: stacks of a hanging rank come from "
                                                       "faulthandler, Python's own")


def clock(now: float, is_kept: bool | None) -> Finding:
    """This machine's time, and whether anything keeps it right (None: cannot be told)."""
    shown = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now)) + " UTC"
    kept = ", not kept in step by this machine's own chrony or ntpd" if is_kept is False else ""
    return judged("clock", shown + kept, (now < _EARLIEST, "bad",
                                          "set it: certificates, logs and the time left in a job are wrong"))


def clock_is_kept() -> bool | None:
    """True if the kernel's clock is synchronised, by adjtimex(2), which only asks."""
    try:
        state = ctypes.create_string_buffer(256)
        answer = ctypes.CDLL(None).adjtimex(state)
    except (OSError, AttributeError):
        return None
    if answer < 0:
        return None
    status = int.from_bytes(state.raw[_STATUS_AT:_STATUS_AT + 4], sys.byteorder)
    return not status & _UNSYNCHRONISED


def _beside(program: str) -> str | None:
    """A program on PATH, or beside this Python, where PATH was never set up."""
    return shutil.which(program) or shutil.which(program, path=os.path.dirname(sys.executable))
