"""Program for tests of launch whose ranks fail as requested: `fault_ranks.py FAULT`.

Every rank first creates the file up<rank> in the run directory, and waits until all ranks have. FAULT is one of:

- `raise`, `kill`, `hog`: rank 3 raises an exception, is killed, or allocates memory endlessly; the others sleep.
- `sleep`: all ranks sleep.
- `resist`: all ranks sleep and ignore SIGTERM, each with a child in its process group and one in a new session.
- `resist-raise`: as `resist`, and rank 3 raises an exception.
- `hang`: rank 3 does not enter a torch (gloo) collective in which the others wait.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ezpz_llm.launcher.basics.ranks import find_rank


def load_batch() -> None:
    time.sleep(600)


def hang() -> None:
    import torch

    from ezpz_llm.training.dist.heartbeat import Heartbeat
    from ezpz_llm.training.dist.setup import setup

    with setup(device="cpu") as ranks:
        heartbeat = Heartbeat(os.environ)
        for step in range(1, 5):
            if ranks.rank == 3 and step == 4:
                load_batch()
            heartbeat.beat("training", step)
            torch.distributed.all_reduce(torch.ones(1))
            # Heartbeats within one second are merged.
            time.sleep(1.1)


info = find_rank(os.environ)
run_dir = Path(os.environ["EZPZ_LLM_RUN_DIR"])
fault = sys.argv[1]
if fault.startswith("resist"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "601"], start_new_session=True)
(run_dir / f"up{info.rank}").touch()
while len(list(run_dir.glob("up*"))) < info.world_size:
    time.sleep(0.02)
print(f"rank {info.rank} is here", flush=True)
if fault == "hang":
    hang()
if info.rank == 3:
    if fault.endswith("raise"):
        raise ValueError("bad shape")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    held = []
    while fault == "hog":
        held.append(b"x" * (16 << 20))
time.sleep(600)
