"""Compilers and DeepSpeed's ops, py-spy, the clock."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ezpz_llm.doctor.result import Check
from ezpz_llm.engine.ops import OPS, building_dir, is_built, ops_dir
from ezpz_llm.preflight.facts.software import installed, torch_build
from ezpz_llm.resources import extensions_dir

_UNSYNCHRONISED = 0x40
_STATUS_AT = 40
"""adjtimex(2): STA_UNSYNC, and where `status` stands in struct timex on 64-bit Linux."""
_EARLIEST = 1.7e9


def checks(env: Mapping[str, str]) -> Iterator[Check]:
    """The lines about tools that a run may need."""
    yield compiler(env)
    if torch_build() and installed("deepspeed"):
        for name in OPS:
            yield Check("ok", f"op {name}", f"built for this machine ({ops_dir()})") if is_built(name) else Check(
                "warn", f"op {name}", "not built", f"ezpz-llm doctor --build-ops {name}, for layouts that offload")
    for lock in stale_locks(env):
        yield Check("warn", "stale lock", f"{lock}: builds of that op would wait for ever",
                    f"rm {shlex.quote(str(lock))}")
    yield py_spy()
    yield clock(time.time(), clock_is_kept())


def compiler(env: Mapping[str, str]) -> Check:
    """What builds ops and torch.compile's kernels."""
    wanted = env.get("CXX", "c++")
    found = shutil.which(wanted, path=env.get("PATH"))
    ninja = _beside("ninja")
    if found is None:
        return Check("warn", "compiler", f"no C++ compiler ({wanted})",
                     "install g++, load its module or set CXX: only DeepSpeed's ops and torch.compile need it")
    if ninja is None:
        return Check("warn", "compiler", f"{found}, but no ninja", "pip install ninja, for DeepSpeed's ops")
    return Check("ok", "compiler", f"{found}, {ninja}")


def stale_locks(env: Mapping[str, str]) -> list[Path]:
    """Locks of compilations that no process works on: in our cache, and in torch's own, where others would wait."""
    from ezpz_llm.engine.build_ops import lock_holder

    places = [building_dir()] if torch_build() and installed("deepspeed") else []
    if chosen := env.get("TORCH_EXTENSIONS_DIR"):
        places.append(Path(chosen))
    else:
        places += sorted((*extensions_dir().glob("*"), *(Path.home() / ".cache" / "torch_extensions").glob("*")))
    return [lock for place in places for lock in sorted(place.glob("*/lock")) if lock_holder(lock) is None]


def py_spy() -> Check:
    """What shows where a hanging rank stands."""
    found = _beside("py-spy")
    if found is None:
        return Check("ok", "py-spy", "not installed: stacks of a hanging rank come from faulthandler, Python's own")
    return Check("ok", "py-spy", found)


def clock(now: float, is_kept: bool | None) -> Check:
    """This machine's time, and whether anything keeps it right (None: cannot be told)."""
    shown = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now)) + " UTC"
    if now < _EARLIEST:
        return Check("bad", "clock", shown, "set it: certificates, logs and the time left in a job are wrong")
    if is_kept is False:
        return Check("ok", "clock", f"{shown}, not kept in step by this machine's own chrony or ntpd")
    return Check("ok", "clock", shown)


def clock_is_kept() -> bool | None:
    """Whether the kernel's clock is synchronised, by adjtimex(2), which only asks."""
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
