"""Short traced training runs as those of explain_ranks.py, on ranks that torch's own variables tell apart.

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
        # A port of its own: a rank that is ahead must not meet the store of the run before.
        os.environ["MASTER_PORT"] = str(first + number)
        if code := run(Path(sys.argv[1]), job):
            raise SystemExit(code)
