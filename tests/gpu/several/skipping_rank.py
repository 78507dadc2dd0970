"""Run by ranks, of which the last one skips a collective and then waits.

    launch -n 2 --idle-timeout 20 python3 tests/gpu/several/skipping_rank.py cuda
"""

from __future__ import annotations

import os
import sys
import time

import torch

from ezpz_llm.training.dist import Heartbeat
from ezpz_llm.training.dist.setup import setup

with setup(device=sys.argv[1]) as dist:
    Heartbeat(os.environ).beat("training", 1)
    value = torch.ones(8, device=dist.device)
    for _ in range(3):
        torch.distributed.all_reduce(value)
    if dist.rank == dist.world_size - 1:
        time.sleep(3600)
    torch.distributed.all_reduce(value)
    print(value.sum().item())
