"""DeepSpeed's compiled ops: where ours are kept and whether one is there (imports neither torch nor DeepSpeed)."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ezpz_llm.errors import UserError
from ezpz_llm.resources import cache_dir

if TYPE_CHECKING:
    from ezpz_llm.engine.layout import Layout

OPS = {"cpu_adam": "CPUAdamBuilder", "pin_memory": "PinMemoryBuilder", "async_io": "AsyncIOBuilder"}
"""The ops that the shipped layouts need, with the name of DeepSpeed's builder; each after those it is built on."""

BUILT_ON = {"async_io": ("pin_memory",)}
"""The ops that must be loaded before another one: async_io takes its page-locked memory from pin_memory."""


def needed_ops(layout: Layout) -> tuple[str, ...]:
    """The ops that a layout cannot run without."""
    needed = ("cpu_adam",) if layout.offload_optimizer else ()
    if "nvme" in (layout.offload_optimizer, layout.offload_param):
        needed += (*BUILT_ON["async_io"], "async_io")
    return needed


def ops_dir() -> Path:
    """The folder of ops for this Python, torch, DeepSpeed and processor.

    The processor counts because ops are compiled for the machine that builds them; another one might not have its
    instructions.
    """
    versions = "-".join(f"{name}{_version(name)}" for name in ("torch", "deepspeed"))
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return cache_dir() / "ops" / f"{python}-{versions}-{platform.machine()}-{_processor()}"


def building_dir() -> Path:
    """Where ops are compiled, before they are moved to `ops_dir` whole."""
    return ops_dir() / "building"


def built_library(name: str) -> Path | None:
    """The file that `doctor --build-ops` made, if it is there."""
    library = ops_dir() / name / f"{name}.so"
    return library if library.is_file() else None


def is_built(name: str) -> bool:
    """Whether a run can use the op as it is: from the cache, or compiled into the installed DeepSpeed."""
    return built_library(name) is not None or name in _installed_ops()


def build_lock(name: str) -> Path:
    """What torch's extension builder holds while it compiles the op, and leaves behind when it is killed."""
    return building_dir() / name / "lock"


def refuse_unbuilt(names: Sequence[str], needed_by: str | None = None) -> None:
    """Raise if one of the ops is not there.

    Raises:
        UserError: says how to build what is missing, and names the locks of builds that go on or were killed.
    """
    missing = [name for name in names if not is_built(name)]
    if not missing:
        return
    locks = [str(build_lock(name)) for name in missing if build_lock(name).exists()]
    unfinished = f"; a build was begun and has not ended ({', '.join(locks)})" if locks else ""
    what = f"op {missing[0]} is" if len(missing) == 1 else f"ops {', '.join(missing)} are"
    raise UserError(f"DeepSpeed's compiled {what} not built for this Python, torch and processor{unfinished}",
                    where=needed_by, instead=f"ezpz-llm doctor --build-ops {' '.join(missing)}")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"{name} is not installed in this Python", where=sys.executable,
                        instead=f"pip install {name}, or run inside launchers/with-env") from None


@functools.cache
def _processor() -> str:
    """A short hash of the processor's model and instruction sets."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = {line.split(":")[0].strip(): line for line in _first_entry(file)}
    except OSError:
        return platform.processor() or "unknown"
    known = "".join(lines.get(key, "") for key in ("model name", "flags", "Features", "CPU part"))
    return hashlib.sha256(known.encode()).hexdigest()[:8]


def _first_entry(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if not line.strip():
            return
        yield line


def _installed_ops() -> frozenset[str]:
    """Ops that were compiled when DeepSpeed was installed, as its own record says."""
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
