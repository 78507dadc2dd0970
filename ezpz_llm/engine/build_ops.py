"""Compile DeepSpeed's ops ahead of a run, with progress, and clear away what a killed build left behind."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from ezpz_llm.dist import Heartbeat
from ezpz_llm.engine.ops import BUILT_ON, OPS, build_lock, building_dir, built_library, is_built, ops_dir
from ezpz_llm.errors import UserError, unknown
from ezpz_llm.launch.phases import BUILDING

_PROGRESS_S = 5.0


def build(name: str) -> None:
    """Compile one op, and what it is built on, into the cache, unless they are there. Says what it does on
    standard output.

    Raises:
        UserError: an unknown op, no compiler, ninja or library, another build of it under way, a compilation that
            fails.
    """
    if name not in OPS:
        raise unknown("op", name, OPS, where="--build-ops")
    if is_built(name):
        print(f"{name} is built: {built_library(name) or 'part of the installed DeepSpeed'}", flush=True)
        return
    _check_tools()
    if name == "async_io":
        _check_libaio()
    for other in BUILT_ON.get(name, ()):
        if not is_built(other):
            build(other)
    Heartbeat(os.environ).beat(BUILDING)
    with _alone(name):
        _clear(name)
        _compile(name)
    print(f"{name} is built: {built_library(name)}", flush=True)


def lock_holder(lock: Path) -> int | None:
    """The process that works in the lock's folder, if there is one; a lock without one is stale."""
    folder = str(lock.parent)
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = process.info["cmdline"] or []
        if process.pid != os.getpid() and (process.info["cwd"] == folder or any(folder in word for word in words)):
            return process.pid
    return None


def _check_tools() -> None:
    compiler = _compiler()[0]
    if shutil.which(compiler) is None:
        raise UserError(f"there is no C++ compiler ({compiler})", where="PATH",
                        instead="install g++ or load the site's compiler module; $CXX names another compiler",
                        exit_code=1)
    if shutil.which("ninja", path=_search_path()) is None:
        raise UserError("there is no ninja", where="PATH", instead="pip install ninja", exit_code=1)


def _check_libaio() -> None:
    """DeepSpeed's own check ends in a traceback that does not say what to install."""
    program = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_setup(1, &context); }\n"
    with tempfile.TemporaryDirectory() as folder:
        words = [*_compiler(), "-x", "c++", "-", "-o", os.path.join(folder, "program"), "-laio"]
        done = subprocess.run(words, input=program, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError("libaio and its header, which the op async_io is made of, are not there",
                        where=next((line for line in done.stderr.splitlines() if "error" in line), None),
                        instead="apt-get install libaio-dev (dnf install libaio-devel); without root, set CPATH "
                                "and LIBRARY_PATH to a copy of it", exit_code=1)


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))


def _search_path() -> str:
    # The programs of a virtual environment count also where it is not activated.
    return os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Hold the op for this process; the system lets go of it however the process ends."""
    ops_dir().mkdir(parents=True, exist_ok=True)
    with open(ops_dir() / f"{name}.holder", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(f"{name} is being built by another process ({file.read().strip()})",
                            where=str(building_dir() / name), instead="wait for it, or end it",
                            exit_code=1) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
        yield


def _clear(name: str) -> None:
    """Remove what a killed build left, which no compiler works on any more."""
    lock = build_lock(name)
    if lock.exists():
        holder = lock_holder(lock)
        if holder is not None:
            raise UserError(f"{name} is being compiled by process {holder}", where=str(lock),
                            instead=f"wait for it, or kill {holder}", exit_code=1)
        minutes = (time.time() - lock.stat().st_mtime) / 60
        print(f"removing the stale lock {lock}: a build was killed {minutes:.0f} minutes ago", flush=True)
    shutil.rmtree(lock.parent, ignore_errors=True)


def _compile(name: str) -> None:
    """Let DeepSpeed's builder compile the op in a process of its own, then move it into place whole."""
    log = ops_dir() / f"{name}.log"
    loads = "".join(f"load_op({other!r}); " for other in BUILT_ON.get(name, ()))
    program = (f"from deepspeed.accelerator import get_accelerator as a; "
               f"from ezpz_llm.engine.deepspeed_import import load_op; {loads}"
               f"a().create_op_builder({OPS[name]!r}).load(verbose=True)")
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(building_dir()), "PATH": _search_path()}
    print(f"building {name} (the compiler's output: {log})", flush=True)
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
                    print(f"building {name}: {time.monotonic() - started:.0f} s", flush=True)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(building_dir() / name, ignore_errors=True)
            raise
    if code != 0 or not (building_dir() / name / f"{name}.so").is_file():
        shutil.rmtree(building_dir() / name, ignore_errors=True)
        raise UserError(f"compiling {name} failed: {_reason(log)}", where=str(log), exit_code=1,
                        instead="see the log; headers and compiler must fit the installed torch")
    (building_dir() / name).rename(ops_dir() / name)
    print(f"building {name}: done in {time.monotonic() - started:.0f} s", flush=True)


def _reason(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "it printed nothing")
