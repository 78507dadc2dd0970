"""Run `ezpz_llm.train` with a process group whose destruction blocks, as NCCL's does during a collective.

    FAILS_IN=STEP python3 tests/helpers/blocking_train.py [options]

Rank 1 raises torch.OutOfMemoryError in this step (counted from 1). From then on, destroying its groups and leaving
the interpreter block, as in the destructors of NCCL's communicators.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import Any

import torch

from ezpz_llm.core.base.errors import run_command
from ezpz_llm.train import main
from ezpz_llm.training.engine.torch_engine import TorchEngine


def block(*args: Any) -> None:
    """Block like a collective whose peers never arrive."""
    time.sleep(600)


if __name__ == "__main__":
    step, steps = TorchEngine.step, [0]

    def failing(self: TorchEngine, lr: float) -> torch.Tensor:
        steps[0] += 1
        if self._mesh.rank == 1 and steps[0] == int(os.environ["FAILS_IN"]):
            atexit.register(block)
            torch.distributed.destroy_process_group = block
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return step(self, lr)

    TorchEngine.step = failing
    sys.exit(run_command(main))
