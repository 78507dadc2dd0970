"""Short traced training runs under several layouts, one after the other in the same processes.

    mpiexec -n 2 python3 tests/explain_ranks.py FOLDER LAYOUT[+OPTION=VALUE…] …

Each leaves FOLDER/LAYOUT.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ezpz_llm.train import main

_SHORT = ("--steps", "12", "--trace-steps", "5", "--profile", "false", "--save-every", "-1", "--eval-tokens",
          "1024", "--sample-tokens", "0", "--log-every", "4", "--block-size", "128")

if __name__ == "__main__":
    folder, *jobs = sys.argv[1:]
    for job in jobs:
        layout, *options = job.split("+")
        changed = [word for option in options for word in ("--" + option).split("=")]
        if code := main(["--ds-config", layout, "--run-dir", str(Path(folder) / layout), *_SHORT, *changed]):
            raise SystemExit(code)
