"""How long `launch --dry-run` and `--help` take: the time between the ask and the prompt.

    python3 benchmarks/launch_time.py

prints the median and the range over ten calls of each, and ends with 1 if the dry run's median is 150 ms or more.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

CALLS = 10
LIMIT_MS = 150.0


def milliseconds(words: list[str]) -> list[float]:
    """Wall-clock time of each call, after one that warms the file cache."""
    times = []
    for _ in range(CALLS + 1):
        began = time.perf_counter()
        subprocess.run(words, stdout=subprocess.DEVNULL, check=True, timeout=60)
        times.append((time.perf_counter() - began) * 1000)
    return times[1:]


def main() -> int:
    launch = str(Path(sys.executable).parent / "launch")
    medians = []
    for words in ([launch, "--dry-run", "-n", "2", "python3", "-m", "ezpz_llm.train"],
                  [launch, "--dry-run", "--json", "-n", "2", "hostname"],
                  [launch, "--help"]):
        times = milliseconds(words)
        medians.append(statistics.median(times))
        print(f"{medians[-1]:6.1f} ms median of {CALLS} ({min(times):.1f} to {max(times):.1f})"
              f"  launch {' '.join(words[1:])}")
    return int(max(medians[:2]) >= LIMIT_MS)


if __name__ == "__main__":
    raise SystemExit(main())
