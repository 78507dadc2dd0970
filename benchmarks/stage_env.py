"""Measure the file-system calls that `launch --stage-env` avoids: python3 benchmarks/stage_env.py [--out FILE.json]

Uses strace to count the file-system calls (open, stat, readlink and similar) of one rank that imports torch and
deepspeed: on the folders of this Python's environment, which the nodes of a cluster share, and on copies. The time
saved depends on the file system, and cannot be measured on one machine. Also reports the duration of staging.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ezpz_llm.core.base.records import as_plain
from ezpz_llm.core.rundir import RunDir, write_json
from ezpz_llm.core.rundir.records import read_record

IMPORT = "import torch, deepspeed"
ENVIRONMENT = tuple(dict.fromkeys((sys.prefix, sys.base_prefix)))


def count_calls(folder: Path, name: str, *options: str) -> dict[str, Any]:
    """Launch one rank under strace, and return the counts of its calls."""
    trace, run_dir = folder / f"{name}.trace", folder / name
    env = {**os.environ, "EZPZ_LLM_CACHE": str(folder / "cache"), "DS_ACCELERATOR": "cpu"}
    subprocess.run(["launch", "-n", "1", "--launcher", "mpiexec", *options, "--run-dir", str(run_dir), "--wrap",
                    f"strace -f -qq -e trace=%file -o {trace}", "python3", "-c", IMPORT],
                   check=True, cwd=folder, env=env, capture_output=True, timeout=600)
    lines = trace.read_text(errors="replace").splitlines()
    shared = re.compile("|".join(f'"{re.escape(path)}[/"]' for path in ENVIRONMENT))
    copies = f"/ezpz_llm-{os.getuid()}-"
    return {"calls_on_shared_folders": sum(bool(shared.search(line)) for line in lines),
            "calls_on_copies": sum(copies in line for line in lines),
            "staging": as_plain(read_record(RunDir(run_dir)).staging)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    if shutil.which("strace") is None:
        raise SystemExit("no strace: apt-get install strace")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        runs = {"not staged": count_calls(folder, "shared"),
                "staged, archive made": count_calls(folder, "first", "--stage-env"),
                "staged, archive there": count_calls(folder, "second", "--stage-env")}
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "command": "python3 benchmarks/stage_env.py",
        "machine": {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
                    **{name: importlib.metadata.version(name) for name in ("torch", "deepspeed")}},
        "one rank": {name: {"calls_on_shared_folders": run["calls_on_shared_folders"],
                            "calls_on_copies": run["calls_on_copies"],
                            "staging_s": run["staging"]["seconds"] if run["staging"] else None,
                            "archive_bytes": sum(one["bytes"] for one in run["staging"]["archives"])
                            if run["staging"] else None} for name, run in runs.items()},
    }
    if out is not None:
        write_json(out, result)
    for name, run in result["one rank"].items():
        print(f"{name:<22} {run}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
