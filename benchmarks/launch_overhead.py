"""Measure launch's overhead over mpiexec: python3 benchmarks/launch_overhead.py [--ranks 8] [--out FILE.json]

Times `launch -n 8 true`, and the mpiexec command of its plan with `true` in place of the ranks' shims, in
alternation, after one pair that warms the file cache. Prints and writes the medians, and the median and range of
the differences within pairs. Exit code 1 if the median difference is more than 0.5 s; 2 if the machine was busy (a
load above 0.5), which makes the results invalid.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ezpz_llm.core.rundir import write_json

LIMIT_S = 0.5
QUIET_LOAD = 0.5


def seconds(words: list[str], cwd: str) -> float:
    """Return the wall-clock time of a successful call."""
    began = time.perf_counter()
    subprocess.run(words, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                   check=True, timeout=120)
    return time.perf_counter() - began


def bare_line(launch: list[str], cwd: str) -> list[str]:
    """Return the launcher's command from launch's plan, with `true` in place of the shim."""
    words = [*launch[:-1], "--dry-run", "--json", launch[-1]]
    plan = json.loads(subprocess.check_output(words, cwd=cwd, text=True, timeout=60))
    shim = plan["argv"].index("ezpz_llm.launcher.on_nodes.shim")
    return [*plan["argv"][:shim - 2], "true"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    launch = [sys.executable, "-m", "ezpz_llm.launch", "-n", str(args.ranks), "true"]
    with tempfile.TemporaryDirectory() as folder:
        bare = bare_line(launch, folder)
        pairs = [(seconds(bare, folder), seconds(launch, folder)) for _ in range(args.pairs + 1)][1:]
    added = [ours - alone for alone, ours in pairs]
    result = {
        "ranks": args.ranks, "pairs": args.pairs, "line": bare,
        "mpiexec_s": round(statistics.median(alone for alone, _ in pairs), 3),
        "launch_s": round(statistics.median(ours for _, ours in pairs), 3),
        "added_s": round(statistics.median(added), 3),
        "added_range_s": [round(min(added), 3), round(max(added), 3)],
        "limit_s": LIMIT_S, "load_before": round(load, 2), "cores": os.cpu_count(),
        "quiet": load <= QUIET_LOAD, "python": platform.python_version(), "date": datetime.date.today().isoformat(),
    }
    print(json.dumps(result, indent=2))
    if args.out:
        write_json(args.out, result)
    if not result["quiet"]:
        print(f"the load before the start was {load:.2f}: the results are invalid", file=sys.stderr)
        return 2
    return int(result["added_s"] > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
