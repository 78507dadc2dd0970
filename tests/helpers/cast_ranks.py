"""Run by several ranks: fraction of the blocks' matrices that autograd keeps in bf16 between forward and backward.

    mpiexec -n 2 python3 tests/helpers/cast_ranks.py FOLDER zero1 bf16:fsdp2 …

Rank 0 writes FOLDER/results.json: the fraction for each layout. The default precision is bf16_autocast.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import torch
from engine_ranks import CONFIGS, make_engine
from rank_jobs import sequences

from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.model.parameters import block_matrix_count

_TOKENS = 23
"""Sequence length, different from every size in the model, so that no activation has the shape of a matrix."""


def share(dist, run: str) -> float:
    """Return the fraction kept after one forward pass."""
    config = CONFIGS["llama"]
    precision, _, layout = run.rpartition(":")
    engine = make_engine(dist, layout, precision or "bf16_autocast", ["llama"])
    sizes = Counter(config.n_layer * [
        tuple(sorted(shape)) for shape in ((config.n_embd, config.n_embd + 2 * config.kv_width),
                                           (config.n_embd, config.n_embd),
                                           *3 * [(config.n_embd, config.intermediate_size)])])
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bfloat16 and tuple(sorted(tensor.shape)) in sizes:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    rows = sequences(0, 1, _TOKENS + 1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = engine.module(rows[:, :-1], rows[:, 1:])
    elements = sum(tensor.numel() for tensor in kept.values() if tensor.untyped_storage().nbytes())
    engine.backward(loss, is_last=True)
    return elements / (config.n_layer * block_matrix_count(config))


if __name__ == "__main__":
    folder, layouts = Path(sys.argv[1]), sys.argv[2:]
    with setup(device="cpu", run_dir=folder / "run") as dist:
        shares = {layout: share(dist, layout) for layout in layouts}
        if dist.is_main:
            (folder / "results.json").write_text(json.dumps(shares))
