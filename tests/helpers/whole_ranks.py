"""Run by several ranks: unsharded bytes that fsdp2 keeps after a micro-step's forward and backward pass.

    mpiexec -n 2 python3 tests/helpers/whole_ranks.py FOLDER fp32 bf16 …

Rank 0 writes FOLDER/results.json: bytes of gathered parameters and unsharded gradients, by precision.
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

from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.setup import setup


def held(dist: Dist, precision: str) -> tuple[int, int]:
    """Return the bytes of gathered parameters and unsharded gradients in the first of two micro-steps."""
    engine = make_engine(dist, "fsdp2", precision, ["llama"])
    gathered: set[nn.Parameter] = set()

    def collect(unit: nn.Module, inputs: Any) -> None:
        gathered.update(parameter for parameter in unit.parameters() if not isinstance(parameter, DTensor))

    for module in engine.module.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(collect)
    rows = sequences(0, 1, 24)
    loss = engine.module(rows[:, :-1], rows[:, 1:])
    parameter_bytes = sum(parameter.untyped_storage().nbytes() for parameter in gathered)
    engine.backward(loss, is_last=False)
    return parameter_bytes, sum(parameter.grad.untyped_storage().nbytes() for parameter in gathered
                                if parameter.grad is not None)


if __name__ == "__main__":
    folder, precisions = Path(sys.argv[1]), sys.argv[2:]
    with setup(device="cpu", run_dir=folder / "run") as dist:
        results = {precision: held(dist, precision) for precision in precisions}
        if dist.is_main:
            (folder / "results.json").write_text(json.dumps(results))
