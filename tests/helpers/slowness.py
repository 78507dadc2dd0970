"""Factor by which this machine is slower than a quiet, fast one, measured once per test run.

Timeouts in tests only end a hang. `scaled` keeps them from ending a test that is merely slow.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

_VARIABLE = "TEST_SLOWNESS"
_PROBE = "import argparse, asyncio, json, subprocess; sum(i * i for i in range(1_000_000))"
_QUIET_PROBE_S = 0.2
"""Seconds of one probe on two quiet, fast cores."""
_MAX_FACTOR = 8.0


def slowness() -> float:
    """Return the slowness factor, at least 1, measuring it first if no parent process has.

    The result is stored in the environment, so that pytest's workers inherit it.
    """
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = f"{_measure():.2f}"
    return float(os.environ[_VARIABLE])


def scaled(seconds: float) -> float:
    """Return `seconds`, as needed on a quiet, fast machine, times the slowness factor."""
    return seconds * slowness()


def _measure() -> float:
    """Time three probes (start Python, import, compute) and compare the slowest with a fast machine's."""
    probe_s = []
    for _ in range(3):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", _PROBE], check=True)
        probe_s.append(time.monotonic() - began)
    return min(max(1.0, max(probe_s) / _QUIET_PROBE_S), _MAX_FACTOR)
