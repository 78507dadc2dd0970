"""Measure the response times of commands: python3 benchmarks/launch_time.py [--out FILE.json]

Times ten calls each of `launch --dry-run` (on this machine, with and without the command's check, and in simulated
reservations of 10,624 PBS and 10,000 Slurm nodes) and of `--help` of several commands, after a call that warms the
file cache. Prints and writes medians and ranges. Exit code 1 if a median exceeds its limit: 150 ms for a plan on
this machine, 1.2 s with the check, 500 ms for a large reservation, 1 s for a help page. The CPU time of
`launch -n 2 --dry-run python3 x.py` may be at most 10 times that of `python3 -c pass`, measured alternately.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ezpz_llm.core.rundir import write_json

CALLS = 10
DRY_RUN_LIMIT_MS = 150.0
CHECKED_LIMIT_MS = 1200.0
LARGE_LIMIT_MS = 500.0
HELP_LIMIT_MS = 1000.0
RATIO_LIMIT = 10.0
RATIO_CALLS = 30


def large_reservations(folder: Path) -> dict[str, dict[str, str]]:
    """Return the environments of a PBS job of Aurora's size and of a Slurm job, with stubs of their programs."""
    for name, body in (("mpiexec", "echo mpiexec version 1.4.0"), ("srun", "exit 1"), ("squeue", "exit 1"),
                       ("qstat", "exit 1")):
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    (folder / "nodes").write_text("".join(f"x{4000 + number // 64}c{number // 8 % 8}s{number % 8}b0n0\n"
                                          for number in range(10624)))
    path = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    pbs = {"PBS_JOBID": "5.aurora-pbs-0001", "PBS_NODEFILE": str(folder / "nodes"), "PBS_O_HOST": "aurora-uan-0010"}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "frontier[00001-10000]",
             "SLURM_TASKS_PER_NODE": "1(x10000)", "SLURM_JOB_CPUS_PER_NODE": "64(x10000)",
             "SLURM_CLUSTER_NAME": "frontier"}
    return {"10,624 PBS nodes": path | pbs, "10,000 Slurm nodes": path | slurm}


def milliseconds(words: list[str], env: dict[str, str]) -> list[float]:
    """Return the wall-clock time of each call, with bytecode caching, the default of Python."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times = []
    for _ in range(CALLS + 1):
        began = time.perf_counter()
        # Reading stdout detects the exit at once; a wait with a timeout alone polls every 50 ms.
        subprocess.run(words, stdout=subprocess.PIPE, check=True, timeout=60, env=inherited | env)
        times.append((time.perf_counter() - began) * 1000)
    return times[1:]


def cpu_ratio(scripts: Path) -> float:
    """Return the median CPU time of a dry run divided by that of an empty program, in alternating calls."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    plan = [str(scripts / "launch"), "-n", "2", "--dry-run", "python3", "x.py"]
    seconds: list[list[float]] = [[], []]
    for _ in range(RATIO_CALLS):
        for words, measured in zip(([sys.executable, "-c", "pass"], plan), seconds, strict=True):
            began = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(words, capture_output=True, check=True, timeout=60, env=env)
            ended = resource.getrusage(resource.RUSAGE_CHILDREN)
            measured.append(ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime)
    empty, planned = map(statistics.median, seconds)
    return planned / empty


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    scripts = Path(sys.executable).parent
    train = ["python3", "-m", "ezpz_llm.train"]
    calls = [(["launch", "--dry-run", "--no-check", "-n", "2", *train], DRY_RUN_LIMIT_MS),
             (["launch", "--dry-run", "-n", "2", *train], CHECKED_LIMIT_MS),
             (["launch", "--dry-run", "--json", "-n", "2", "hostname"], DRY_RUN_LIMIT_MS),
             (["launch", "--help"], HELP_LIMIT_MS), (["ezpz-llm", "--help"], HELP_LIMIT_MS)]
    calls += [(["ezpz-llm", command, "--help"], HELP_LIMIT_MS)
              for command in ("train", "test_dist", "data", "doctor")]
    with tempfile.TemporaryDirectory() as folder:
        large = [(["launch", "--dry-run", "--no-check", *train], LARGE_LIMIT_MS, where, env)
                 for where, env in large_reservations(Path(folder)).items()]
        results = timed([*((*call, "", {}) for call in calls), *large], scripts)
    ratio = cpu_ratio(scripts)
    print(f"{ratio:7.1f} times the CPU time of `python3 -c pass` (limit {RATIO_LIMIT:g})  "
          "launch -n 2 --dry-run python3 x.py")
    if out:
        write_json(out, {"command": f"python3 benchmarks/launch_time.py --out {out}", "calls": CALLS,
                         "date": datetime.date.today().isoformat(), "python": platform.python_version(),
                         "load": round(os.getloadavg()[0], 1), "cores": os.cpu_count(), "results": results,
                         "dry_run_cpu_ratio": round(ratio, 1), "dry_run_cpu_ratio_limit": RATIO_LIMIT})
    return int(ratio > RATIO_LIMIT or any(result["median_ms"] >= result["limit_ms"] for result in results))


def timed(calls: list[tuple[list[str], float, str, dict[str, str]]], scripts: Path) -> list[dict[str, Any]]:
    """Time calls, each given as command, limit in ms, description of its environment, and environment."""
    results = []
    for words, limit, where, env in calls:
        times = milliseconds([str(scripts / words[0]), *words[1:]], env)
        command = " ".join(words) + (f" ({where})" if where else "")
        results.append({"command": command, "median_ms": round(statistics.median(times), 1),
                        "min_ms": round(min(times), 1), "max_ms": round(max(times), 1), "limit_ms": limit})
        print("{median_ms:7.1f} ms ({min_ms} to {max_ms}, limit {limit_ms:g})  {command}".format(**results[-1]))
    return results


if __name__ == "__main__":
    sys.exit(main())
