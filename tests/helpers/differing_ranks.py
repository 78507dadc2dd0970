"""Run by four ranks, two tensor-parallel ones in each group: rank 2 calls another collective than its peer."""

from __future__ import annotations

import os

import torch

from ezpz_llm.training.dist import Heartbeat
from ezpz_llm.training.dist.setup import setup

with setup(device="cpu") as dist:
    Heartbeat(os.environ).beat("training", 1)
    dist.arrange(tp=2)
    peers = dist.mesh.group("tp")
    for _ in range(3):
        torch.distributed.all_reduce(torch.ones(8), group=peers)
        torch.distributed.all_reduce(torch.ones(3))
    if dist.rank == 2:
        torch.distributed.broadcast(torch.ones(8), src=2, group=peers)
    torch.distributed.all_reduce(torch.ones(8), group=peers)
    torch.distributed.all_reduce(torch.ones(5))
