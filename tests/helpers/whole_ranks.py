"""Run by several ranks: bytes that fsdp2 holds whole after a micro-step's forward pass, and its backward pass.

    mpiexec -n 2 python3 tests/helpers/whole_ranks.py FOLDER fp32 bf16 …

Rank 0 writes FOLDER/results.json: by precision, gathered parameters and whole gradients.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from engine_ranks import make_engine
from rank_jobs import sequences
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ezpz_llm.dist import Dist
from ezpz_llm.dist.setup import setup


def held(dist: Dist, precision: str) -> tuple[int, int]:
    """In the first of two micro-steps."""
    engine = make_engine(dist, "fsdp2", precision, ["llama"])
    gathered: set[nn.Parameter] = set()

    def collect(unit: nn.Module, inputs: Any) -> None:
        gathered.update(one for one in unit.parameters() if not isinstance(one, DTensor))

    for module in engine.module.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(collect)
    rows = sequences(0, 1, 24)
    loss = engine.forward(rows[:, :-1], rows[:, 1:], last_micro_step=False)
    parameters = sum(one.untyped_storage().nbytes() for one in gathered)
    engine.backward(loss)
    return parameters, sum(one.grad.untyped_storage().nbytes() for one in gathered if one.grad is not None)


if __name__ == "__main__":
    folder, precisions = Path(sys.argv[1]), sys.argv[2:]
    with setup(device="cpu", run_dir=folder / "run") as dist:
        found = {precision: held(dist, precision) for precision in precisions}
        if dist.is_main:
            (folder / "results.json").write_text(json.dumps(found))
