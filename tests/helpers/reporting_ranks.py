"""A program for tests of launch that needs no torch: each rank prints what it finds itself to be, as one line of
JSON, and then does as its first word says.

`report`: nothing more. `exit`, `SIGKILL`, `SIGSEGV`: rank 1 ends so, the others sleep. `await FILE`: each rank
touches the file `here` of its run directory, and waits for FILE. `last S`: rank 0 ends, the others sleep S seconds.
`read`: each rank counts what it reads.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from ezpz_llm.launch.ranks import find_rank

NAMES = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "PMI_RANK",
         "PMIX_RANK", "TORCH_CPP_LOG_LEVEL", "MY_OWN", "EZPZ_LLM_OF_MINE", "SITE_WORD", "WRAPPED", "RANK",
         "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")

info = find_rank(os.environ)
report = {"rank": info.rank, "size": info.world_size, "local_rank": info.local_rank, "local_size": info.local_size,
          "node_rank": info.node_rank, "source": info.source, "host": socket.gethostname(), "argv": sys.argv[1:],
          "cores": sorted(os.sched_getaffinity(0)), "env": {name: os.environ.get(name) for name in NAMES}}
how = sys.argv[1]
if how == "read":
    report["read"] = len(sys.stdin.buffer.read())
print(json.dumps(report), flush=True)
if how in ("exit", "SIGKILL", "SIGSEGV"):
    if info.rank == 1:
        if how == "exit":
            sys.exit(7)
        os.kill(os.getpid(), getattr(signal, how))
    time.sleep(60)
if how == "last" and info.rank:
    time.sleep(float(sys.argv[2]))
if how == "await":
    Path(os.environ["EZPZ_LLM_RUN_DIR"], "here").touch()
    deadline = time.monotonic() + 40
    while not Path(sys.argv[2]).exists():
        if time.monotonic() > deadline:
            sys.exit(f"nobody wrote {sys.argv[2]}")
        time.sleep(0.05)
