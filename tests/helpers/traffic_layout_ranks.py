"""Run the traced training runs of explain_ranks.py on ranks set by torch's variables, without a launcher.

    RANK=… WORLD_SIZE=… MASTER_ADDR=… MASTER_PORT=… python3 tests/helpers/traffic_layout_ranks.py FOLDER JOB…
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from explain_ranks import run

if __name__ == "__main__":
    first = int(os.environ["MASTER_PORT"])
    for number, job in enumerate(sys.argv[2:]):
        # A new port for each run: a rank that is ahead must not connect to the previous run's store.
        os.environ["MASTER_PORT"] = str(first + number)
        if code := run(Path(sys.argv[1]), job):
            raise SystemExit(code)
