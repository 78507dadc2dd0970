"""Cache of DeepSpeed's compiled ops, and building them before a run (imports no torch)."""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from ezpz_llm.core.base import (
    UserError,
    cache_dir,
    installed,
    print_lines,
    processor_id,
    unknown_name_error,
)
from ezpz_llm.launcher.basics.variables import BUILDING
from ezpz_llm.training.dist import Heartbeat
from ezpz_llm.training.layout.layout import Layout

OPS = {"cpu_adam": "CPUAdamBuilder", "pin_memory": "PinMemoryBuilder", "async_io": "AsyncIOBuilder"}
"""Ops that the shipped layouts need, with DeepSpeed's builder; dependencies come first."""

OP_DEPENDENCIES = {"async_io": ("pin_memory",)}
"""Ops to load before another op: async_io allocates page-locked memory with pin_memory."""


def needed_ops(layout: Layout) -> tuple[str, ...]:
    """Return the ops that a layout needs."""
    needed: tuple[str, ...] = ("cpu_adam",) if layout.zero.offload_optimizer else ()
    if "nvme" in (layout.zero.offload_optimizer, layout.zero.offload_param):
        needed += (*OP_DEPENDENCIES["async_io"], "async_io")
    return needed


def ops_dir() -> Path:
    """Return the folder of ops for this Python, torch, DeepSpeed and processor.

    Ops are compiled for the processor that builds them; another one may not support its instructions.
    """
    versions = "-".join(f"{name}{_version(name)}" for name in ("torch", "deepspeed"))
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return cache_dir() / "ops" / f"{python}-{versions}-{platform.machine()}-{processor_id()}"


def building_dir() -> Path:
    """Return the folder in which ops are compiled before they are moved to `ops_dir`."""
    return ops_dir() / "building"


def built_library(name: str) -> Path | None:
    """Return the library that `doctor --build-ops` built, or None."""
    library = ops_dir() / name / f"{name}.so"
    return library if library.is_file() else None


def is_built(name: str) -> bool:
    """Return True if the op is in the cache or compiled into the installed DeepSpeed."""
    return built_library(name) is not None or name in _installed_ops()


def build_lock(name: str) -> Path:
    """Return the lock that torch's extension builder holds while it compiles, and leaves if it is killed."""
    return building_dir() / name / "lock"


def reject_unbuilt_ops(names: Sequence[str], needed_by: str | None = None) -> None:
    """Check that all of the ops are built.

    Raises:
        UserError: an op is missing. The message names the command that builds it and locks of unfinished builds.
    """
    missing = [name for name in names if not is_built(name)]
    if not missing:
        return
    locks = [str(build_lock(name)) for name in missing if build_lock(name).exists()]
    unfinished = f"; a build is unfinished ({', '.join(locks)})" if locks else ""
    subject = f"op {missing[0]} is" if len(missing) == 1 else f"ops {', '.join(missing)} are"
    raise UserError(f"DeepSpeed's compiled {subject} not built for this Python, torch and processor{unfinished}",
                    where=needed_by, instead=f"ezpz-llm doctor --build-ops {' '.join(missing)}")


def _version(name: str) -> str:
    if (version := installed(name)) is None:
        raise UserError(f"{name} is not installed in this Python", where=sys.executable,
                        instead=f"pip install {name}, or run inside launchers/with-env")
    return version


def _installed_ops() -> frozenset[str]:
    """Return the ops that were compiled when DeepSpeed was installed, from its own record."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return frozenset()
    record = Path(spec.origin).with_name("git_version_info_installed.py")
    if not record.is_file():
        return frozenset()
    for line in record.read_text().splitlines():
        if line.startswith("installed_ops="):
            return frozenset(name for name, built in ast.literal_eval(line.split("=", 1)[1]).items() if built)
    return frozenset()


_PROGRESS_S = 5.0


def build(name: str) -> None:
    """Compile an op and its dependencies into the cache unless they exist, with progress on stdout.

    Raises:
        UserError: an unknown op, a missing compiler, ninja or library, another running build, a failed compilation.
    """
    if name not in OPS:
        raise unknown_name_error("op", name, OPS, where="--build-ops")
    if is_built(name):
        print_lines(f"{name} is built: {built_library(name) or 'part of the installed DeepSpeed'}")
        return
    _check_tools()
    if name == "async_io":
        _check_libaio()
    for dependency in OP_DEPENDENCIES.get(name, ()):
        if not is_built(dependency):
            build(dependency)
    Heartbeat(os.environ).beat(BUILDING)
    with _hold_build_lock(name):
        _remove_unfinished(name)
        _compile(name)
    print_lines(f"{name} is built: {built_library(name)}")


def lock_holder(lock: Path) -> int | None:
    """Return the id of a process that uses the lock's folder, or None if the lock is stale."""
    folder = str(lock.parent)
    for process in psutil.process_iter(["cmdline", "cwd"]):
        argv = process.info["cmdline"] or []
        if process.pid != os.getpid() and (process.info["cwd"] == folder or any(folder in word for word in argv)):
            return process.pid
    return None


def _check_tools() -> None:
    compiler = _compiler()[0]
    if shutil.which(compiler) is None:
        raise UserError(f"C++ compiler {compiler} not found", where="PATH",
                        instead="install g++, load the site's compiler module, or set CXX",
                        exit_code=1)
    if shutil.which("ninja", path=_search_path()) is None:
        raise UserError("ninja not found", where="PATH", instead="pip install ninja", exit_code=1)


def _check_libaio() -> None:
    """Check for libaio; DeepSpeed's own check fails with a traceback that does not say what to install."""
    program = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_setup(1, &context); }\n"
    with tempfile.TemporaryDirectory() as folder:
        command = [*_compiler(), "-x", "c++", "-", "-o", os.path.join(folder, "program"), "-laio"]
        result = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise UserError("libaio and its header, which the op async_io needs, are missing",
                        where=next((line for line in result.stderr.splitlines() if "error" in line), None),
                        instead="apt-get install libaio-dev (dnf install libaio-devel); without root, set CPATH "
                                "and LIBRARY_PATH to a copy of libaio", exit_code=1)


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))


def _search_path() -> str:
    # Also find programs in the virtual environment of this Python if it is not activated.
    return os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))


@contextmanager
def _hold_build_lock(name: str) -> Iterator[None]:
    """Hold a file lock on the op; the system releases it however this process ends."""
    ops_dir().mkdir(parents=True, exist_ok=True)
    with open(ops_dir() / f"{name}.holder", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(f"{name} is being built by another process ({file.read().strip()})",
                            where=str(building_dir() / name), instead="wait for that build, or stop it",
                            exit_code=1) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
        yield


def _remove_unfinished(name: str) -> None:
    """Remove the files of a killed build.

    Raises:
        UserError: a process is still compiling.
    """
    lock = build_lock(name)
    if lock.exists():
        holder = lock_holder(lock)
        if holder is not None:
            raise UserError(f"{name} is being compiled by process {holder}", where=str(lock),
                            instead=f"wait for that process, or kill {holder}", exit_code=1)
        minutes = (time.time() - lock.stat().st_mtime) / 60
        print_lines(f"removing the stale lock {lock}: a build was killed {minutes:.0f} minutes ago")
    shutil.rmtree(lock.parent, ignore_errors=True)


def _compile(name: str) -> None:
    """Compile the op with DeepSpeed's builder in a subprocess, then move it into the cache."""
    log = ops_dir() / f"{name}.log"
    loads = "".join(f"load_op({dependency!r}); " for dependency in OP_DEPENDENCIES.get(name, ()))
    program = (f"from deepspeed.accelerator import get_accelerator as a; "
               f"from ezpz_llm.training.engine.deepspeed_import import load_op; {loads}"
               f"a().create_op_builder({OPS[name]!r}).load(verbose=True)")
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(building_dir()), "PATH": _search_path()}
    print_lines(f"building {name} (compiler output: {log})")
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", program], env=env, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while True:
                try:
                    code = process.wait(_PROGRESS_S)
                    break
                except subprocess.TimeoutExpired:
                    print_lines(f"building {name}: {time.monotonic() - started:.0f} s")
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(building_dir() / name, ignore_errors=True)
            raise
    if code != 0 or not (building_dir() / name / f"{name}.so").is_file():
        shutil.rmtree(building_dir() / name, ignore_errors=True)
        raise UserError(f"compiling {name} failed: {_failure_reason(log)}", where=str(log), exit_code=1,
                        instead="see the log; headers and compiler must match the installed torch")
    (building_dir() / name).rename(ops_dir() / name)
    print_lines(f"building {name}: done in {time.monotonic() - started:.0f} s")


def _failure_reason(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "it printed nothing")
