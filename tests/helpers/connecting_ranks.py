"""A program for tests of launch that needs no torch: its ranks meet at MASTER_ADDR:MASTER_PORT, and rank 0 writes
down who came from where, into met.json of the run directory. `connecting_ranks.py S`: and then sleep S seconds."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from ezpz_llm.launch.ranks import find_rank

NAMES = ("PBS_JOBID", "PBS_ARRAY_INDEX", "SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "OMP_NUM_THREADS",
         "EZPZ_LLM_ENDS_AT", "MASTER_ADDR", "MASTER_PORT")


def connected(place: tuple[str, int], deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(place, timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


info = find_rank(os.environ)
own = {"rank": info.rank, "host": socket.gethostname(), "local_rank": info.local_rank,
       **{name: os.environ.get(name) for name in NAMES}}
# torchrun listens on the port itself, for torch's own store.
beside = "TORCHELASTIC_RUN_ID" in os.environ
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + beside)
if info.rank == 0:
    came = [own]
    with socket.create_server(("", place[1]), backlog=64) as server:
        server.settimeout(30)
        while len(came) < info.world_size:
            peer = server.accept()[0]
            with peer, peer.makefile() as words:
                came.append(json.loads(words.readline()))
    came.sort(key=lambda one: one["rank"])
    (Path(os.environ["EZPZ_LLM_RUN_DIR"]) / "met.json").write_text(json.dumps(came))
    print("met", len(came), flush=True)
else:
    with connected(place, time.monotonic() + 30) as peer:
        peer.sendall(json.dumps(own).encode() + b"\n")
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
