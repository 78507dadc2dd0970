"""Run by four ranks: measure links between 4, 3, 2 and 1 simulated nodes, then with a slow last rank.

    mpiexec -n 4 python3 tests/helpers/link_ranks.py FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from ezpz_llm.training.dist.links import measure_links
from ezpz_llm.training.dist.setup import setup

if __name__ == "__main__":
    with setup(device="cpu", run_dir=Path(sys.argv[1])) as dist:
        links = {}
        for hosts in (4, 3, 2, 1):
            links[hosts] = measure_links(dist, f"node{dist.rank * hosts // 4}")
        send = torch.distributed.send
        if dist.rank == 3:
            torch.distributed.send = lambda *args, **options: (time.sleep(0.1), send(*args, **options))
        links["slow"] = measure_links(dist, f"node{dist.rank}")
        if dist.is_main:
            (Path(sys.argv[1]) / "links.json").write_text(json.dumps(links))
