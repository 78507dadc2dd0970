"""Run a module or script with gloo for collectives of device tensors, if NCCL refuses ranks that share a GPU.

    python3 tests/gpu/several/gloo_rank.py -m ezpz_llm.train …

gloo copies tensors through the CPU, so that any number of ranks can share a GPU, slowly.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from running import run_program

from ezpz_llm.training.dist.backends import DEVICES

if __name__ == "__main__":
    for kind, traits in DEVICES.items():
        DEVICES[kind] = replace(traits, collectives="gloo", bound=False, averages=False)
    run_program(sys.argv[1:])
