"""Show what this machine offers a run, and build DeepSpeed's ops ahead of one."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ezpz_llm.engine.ops import OPS, building_dir, is_built, ops_dir
from ezpz_llm.errors import UserError, run_command
from ezpz_llm.resources import cache_dir


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code: 0, or that of a build that failed."""
    parser = argparse.ArgumentParser(prog="ezpz-llm doctor", description=__doc__)
    parser.add_argument("--build-ops", nargs="*", metavar="OP",
                        help=f"compile these ops into the cache (default: all that layouts need: {', '.join(OPS)})")
    options = parser.parse_args(argv)
    if options.build_ops is None:
        print(report())
        return 0
    from ezpz_llm.engine.build_ops import build

    for name in options.build_ops or OPS:
        build(name)
    return 0


def report() -> str:
    """The table: versions, launcher, devices, cache, ops, and locks that killed builds left."""
    rows = [("python", f"{platform.python_version()} ({sys.executable})"),
            ("torch", _torch()), ("deepspeed", _installed("deepspeed")), ("launcher", _launcher()),
            ("devices", _devices()), ("cache", str(cache_dir()))]
    if _installed("torch") and _installed("deepspeed"):
        rows += [(f"op {name}", f"built for this machine ({ops_dir()})" if is_built(name)
                  else f"not built: ezpz-llm doctor --build-ops {name}") for name in OPS]
    rows += [("stale lock", f"rm {shlex.quote(str(lock))}") for lock in stale_locks()]
    return "\n".join(f"{name:<14}{text}" for name, text in rows)


def stale_locks() -> list[Path]:
    """Locks of compilations that no process works on: in our cache, and in torch's own, where others would wait."""
    from ezpz_llm.engine.build_ops import lock_holder

    places = [building_dir()] if _installed("torch") and _installed("deepspeed") else []
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        places.append(Path(chosen))
    else:
        places += sorted((Path.home() / ".cache" / "torch_extensions").glob("*"))
    return [lock for place in places for lock in sorted(place.glob("*/lock")) if lock_holder(lock) is None]


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _torch() -> str:
    found = _installed("torch")
    if not found:
        return "not installed"
    import torch

    platforms = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    built_for = " and ".join(f"{name} {release}" for name, release in platforms.items() if release)
    return f"{found}, built for {built_for or 'CPU'}"


def _launcher() -> str:
    from ezpz_llm.launch.dialects import choose
    from ezpz_llm.launch.schedulers import find_allocation

    try:
        allocation = find_allocation(os.environ)
        launcher = choose("auto", allocation.scheduler, 2, os.environ)
    except UserError as error:
        return f"none: {error.found}"
    return f"{launcher.dialect} ({launcher.program}; {launcher.source})"


def _devices() -> str:
    if not _installed("torch"):
        return "unknown without torch"
    import torch

    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        if module.is_available():
            names = [module.get_device_name(index) for index in range(module.device_count())]
            return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    cores = len(os.sched_getaffinity(0))
    return "Apple GPU" if torch.backends.mps.is_available() else f"no GPU; {cores} CPU cores"


if __name__ == "__main__":
    raise SystemExit(run_command(main))
