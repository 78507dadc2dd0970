"""Program for tests of launch, without torch: each rank prints its rank, node and environment as a line of JSON.

The first argument selects what follows:

- `report`: nothing.
- `exit`, `SIGKILL`, `SIGSEGV`: rank 1 exits or is killed this way, the others sleep.
- `await FILE`: each rank creates the file `here` in the run directory, and waits for FILE.
- `last S`: rank 0 ends, the others sleep S seconds.
- `read`: each rank reports the number of bytes read from its standard input.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from ezpz_llm.launcher.basics.ranks import find_rank

NAMES = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "PMI_RANK",
         "PMIX_RANK", "TORCH_CPP_LOG_LEVEL", "MY_OWN", "EZPZ_LLM_OF_MINE", "SITE_WORD", "WRAPPED", "RANK",
         "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")

info = find_rank(os.environ)
report = {"rank": info.rank, "size": info.world_size, "local_rank": info.local_rank, "local_size": info.local_size,
          "node_rank": info.node_rank, "source": info.source, "host": socket.gethostname(), "argv": sys.argv[1:],
          "cores": sorted(os.sched_getaffinity(0)), "env": {name: os.environ.get(name) for name in NAMES}}
action = sys.argv[1]
if action == "read":
    report["read"] = len(sys.stdin.buffer.read())
print(json.dumps(report), flush=True)
if action in ("exit", "SIGKILL", "SIGSEGV"):
    if info.rank == 1:
        if action == "exit":
            sys.exit(7)
        os.kill(os.getpid(), getattr(signal, action))
    time.sleep(60)
if action == "last" and info.rank:
    time.sleep(float(sys.argv[2]))
if action == "await":
    Path(os.environ["EZPZ_LLM_RUN_DIR"], "here").touch()
    deadline = time.monotonic() + 40
    while not Path(sys.argv[2]).exists():
        if time.monotonic() > deadline:
            sys.exit(f"{sys.argv[2]} did not appear")
        time.sleep(0.05)
