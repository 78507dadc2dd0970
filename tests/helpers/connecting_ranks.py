"""Program for tests of launch, without torch: all ranks connect to MASTER_ADDR:MASTER_PORT.

Rank 0 writes met.json into the run directory: rank, hostname, local rank and variables of each rank.
`connecting_ranks.py S` then sleeps S seconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from ezpz_llm.launcher.basics.ranks import find_rank

NAMES = ("PBS_JOBID", "PBS_ARRAY_INDEX", "SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "OMP_NUM_THREADS",
         "EZPZ_LLM_ENDS_AT", "MASTER_ADDR", "MASTER_PORT")


def connect(address: tuple[str, int], deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address, timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


info = find_rank(os.environ)
own = {"rank": info.rank, "host": socket.gethostname(), "local_rank": info.local_rank,
       **{name: os.environ.get(name) for name in NAMES}}
# torchrun itself listens on MASTER_PORT, for torch's store.
is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + is_torchrun)
if info.rank == 0:
    reports = [own]
    with socket.create_server(("", address[1]), backlog=64) as server:
        server.settimeout(30)
        while len(reports) < info.world_size:
            peer = server.accept()[0]
            with peer, peer.makefile() as stream:
                reports.append(json.loads(stream.readline()))
    reports.sort(key=lambda report: report["rank"])
    (Path(os.environ["EZPZ_LLM_RUN_DIR"]) / "met.json").write_text(json.dumps(reports))
    print("met", len(reports), flush=True)
else:
    with connect(address, time.monotonic() + 30) as peer:
        peer.sendall(json.dumps(own).encode() + b"\n")
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
