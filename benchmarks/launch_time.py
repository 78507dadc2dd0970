"""How long it takes to be answered: python3 benchmarks/launch_time.py [--out FILE.json]

Times ten calls each of `launch --dry-run` and of every command's `--help`, after one that warms the file cache.
Prints, and writes, the medians and ranges; exit code 1 if a dry run's median reaches 150 ms or a help's 1 s.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

from ezpz_llm.rundir import write_json

CALLS = 10
DRY_RUN_LIMIT_MS = 150.0
HELP_LIMIT_MS = 1000.0


def milliseconds(words: list[str]) -> list[float]:
    """Wall-clock time of each call."""
    times = []
    for _ in range(CALLS + 1):
        began = time.perf_counter()
        subprocess.run(words, stdout=subprocess.DEVNULL, check=True, timeout=60)
        times.append((time.perf_counter() - began) * 1000)
    return times[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    scripts = Path(sys.executable).parent
    calls = [(["launch", "--dry-run", "-n", "2", "python3", "-m", "ezpz_llm.train"], DRY_RUN_LIMIT_MS),
             (["launch", "--dry-run", "--json", "-n", "2", "hostname"], DRY_RUN_LIMIT_MS),
             (["launch", "--help"], HELP_LIMIT_MS), (["ezpz-llm", "--help"], HELP_LIMIT_MS)]
    calls += [(["ezpz-llm", command, "--help"], HELP_LIMIT_MS)
              for command in ("train", "test_dist", "data", "doctor")]
    results = []
    for words, limit in calls:
        times = milliseconds([str(scripts / words[0]), *words[1:]])
        results.append({"command": " ".join(words), "median_ms": round(statistics.median(times), 1),
                        "min_ms": round(min(times), 1), "max_ms": round(max(times), 1), "limit_ms": limit})
        print("{median_ms:7.1f} ms ({min_ms} to {max_ms}, limit {limit_ms:g})  {command}".format(**results[-1]))
    if out:
        write_json(out, {"command": f"python3 benchmarks/launch_time.py --out {out}", "calls": CALLS,
                         "date": datetime.date.today().isoformat(), "python": platform.python_version(),
                         "load": round(os.getloadavg()[0], 1), "cores": os.cpu_count(), "results": results})
    return int(any(result["median_ms"] >= result["limit_ms"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
