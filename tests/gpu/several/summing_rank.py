"""Run by ranks that sum a tensor on their devices: launch -n 2 python3 tests/gpu/several/summing_rank.py cuda"""

from __future__ import annotations

import sys

import torch

from ezpz_llm.training.dist.setup import setup

with setup(device=sys.argv[1]) as dist:
    value = torch.ones(8, device=dist.device)
    torch.distributed.all_reduce(value)
    if value.tolist() != [float(dist.world_size)] * 8:
        sys.exit(f"the sum is {value.tolist()}")
