"""Run by two ranks: one compiled step under each layout named, and the graphs that torch.compile made for it.

    mpiexec -n 2 python3 tests/helpers/compile_ranks.py FOLDER ddp zero1 zero1+dropout …

Rank 0 writes FOLDER/results.json: for each run, {"graphs": …, "breaks": …}. `compile_blocks` compiles the blocks
with torch's aot_eager backend, which only traces. The head's loss is left eager, since it has its own graphs.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from unittest import mock

import torch
from rank_jobs import sequences, take_runs
from torch import nn

from ezpz_llm.training.dist import Dist
from ezpz_llm.training.engine.build import assemble, build_engine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.compile import compile_blocks
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.init import decay_groups
from ezpz_llm.training.model.recomputation import recompute_blocks

LAYERS, LENGTH, ACCUMULATION = 4, 32, 2


def count(dist: Dist, run: str) -> dict[str, int]:
    """Train two steps of two micro-steps and check that the second step compiles nothing."""
    layout, *options = run.split("+")
    model_config = get_model_config("tiny-llama", n_layer=LAYERS, n_embd=32, n_head=4, n_kv_head=2,
                                    block_size=LENGTH, dropout=0.1 if "dropout" in options else 0.0)
    resolved = resolve(Request(layout, world_size=dist.world_size, micro_batch=2, accumulation=ACCUMULATION,
                               clip=1.0, precision="fp32", device="cpu", model=model_config))
    plan = resolved.layout
    dist.arrange(tp=plan.tp, pp=plan.pp, sp=plan.sp)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = assemble(model_config, plan, dist.mesh, 1337)
    recompute_blocks(model, 1 if "recompute" in options else 0)
    only_traces = functools.partialmethod(nn.Module.compile, backend="aot_eager")
    with mock.patch.object(nn.Module, "compile", only_traces):
        compile_blocks(model)
    if hasattr(model, "lm_head"):
        model.lm_head.compiler = None
    engine = build_engine(model, resolved, dist, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                          param_groups=decay_groups(model, 0.1))
    counts = []
    for step in range(2):
        rows = sequences(step, 2 * ACCUMULATION, LENGTH + 1).chunk(ACCUMULATION)
        engine.train_step([(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in rows], 1e-3,
                          lambda phase: nullcontext())
        counts.append({"graphs": counters["stats"]["unique_graphs"],
                       "breaks": sum(counters["graph_break"].values())})
    assert counts[0] == counts[1], counts
    return counts[1]


if __name__ == "__main__":
    take_runs(count)
