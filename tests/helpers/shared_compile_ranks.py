"""Run by several ranks: graphs that SharedCompiler compiles and loads when the run starts with different caches.

    mpiexec -n 4 python3 tests/helpers/shared_compile_ranks.py FOLDER first restart …

Each run begins with an empty cache of inductor, as on another node, and with the folder that the runs before left
in EZPZ_LLM_CACHE. FOLDER/results.json has the graphs compiled and loaded by all ranks together, and the sum over
ranks of a value that the compiled code computes. A run with a plus compiles the blocks of a model under that
layout, the others compile a small function.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import torch
from rank_jobs import sequences, take_runs
from torch.distributed import PrefixStore

from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import all_gather
from ezpz_llm.training.engine.build import assemble, build_engine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.compile import compile_blocks
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.init import decay_groups
from ezpz_llm.training.model.shared_compilation import SharedCompiler, compiled_dir, shared_compiler

LENGTH = 32


def small_function(compiler: SharedCompiler, columns: int, file: str) -> float:
    """Compile a function of this source file with a gradient, and return the sum of its gradient."""
    source: dict[str, Any] = {}
    exec(compile("def function(value):\n    return (value.sin() * value).sum()", file, "exec"), source)
    x = torch.linspace(-1, 1, 3 * columns).reshape(3, columns).requires_grad_()
    torch.compile(source["function"], backend=compiler)(x).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (x.cos() * x + x.sin()).detach())
    return float(x.grad.abs().sum())


def blocks(compiler: SharedCompiler, layout: str, dist: Dist) -> float:
    """Compile the blocks and the loss of a small model, train a step, and return its loss."""
    config = get_model_config("tiny-llama", n_layer=2, n_embd=32, n_head=4, n_kv_head=2, block_size=LENGTH)
    resolved = resolve(Request(layout, world_size=dist.world_size, micro_batch=2, accumulation=2, clip=1.0,
                               precision="fp32", device="cpu", model=config))
    plan = resolved.layout
    dist.arrange(tp=plan.tp, pp=plan.pp, sp=plan.sp)
    model = assemble(config, plan, dist.mesh, 1337)
    compile_blocks(model, compiler)
    engine = build_engine(model, resolved, dist, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                          param_groups=decay_groups(model, 0.1))
    rows = sequences(0, 4, LENGTH + 1).chunk(2)
    loss, _ = engine.train_step([(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in rows], 1e-3,
                                lambda phase: nullcontext())
    return float(loss)


def start(nodes: ExitStack, dist: Dist, run: str) -> dict[str, Any]:
    """Start as a new process would: nothing compiled in memory, another cache on the node."""
    torch._dynamo.reset()
    own_node = dist.rank >= 2 and run.startswith("two folders")
    local = all_gather(dist, nodes.enter_context(tempfile.TemporaryDirectory()))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = local[2 * own_node]
    store = dist.optional.store
    assert store is not None
    kind, _, layout = run.partition("+")
    with ExitStack() as stack:
        # Each start of a run has a store of its own.
        stack.enter_context(mock.patch.object(dist.optional, "store", PrefixStore(run, store)))
        if kind == "other torch":
            stack.enter_context(mock.patch.object(torch, "__version__", "2.99.0"))
        if kind == "no cache":
            stack.enter_context(torch._inductor.config.patch(fx_graph_cache=False))
        if own_node:
            other = os.environ["EZPZ_LLM_CACHE"] + " of another node"
            stack.enter_context(mock.patch.dict(os.environ, EZPZ_LLM_CACHE=other))
        if dist.is_main and kind in ("damaged", "invalid"):
            for file in compiled_dir(dist.device).glob("[!.]*"):
                entries = b"no entries of inductor"
                file.write_bytes(file.read_bytes()[:-100] if kind == "damaged" else
                                 hashlib.sha256(entries).digest() + entries)
        all_gather(dist, None)
        compiler = shared_compiler()
        compiler.start(dist)
        columns = 5 if kind == "other shape" else 4
        value = blocks(compiler, layout, dist) if layout else small_function(compiler, columns, f"{kind}.py")
        all_gather(dist, None)
        compiled, loaded = compiler.counts()
    return {"compiled": compiled, "loaded": loaded, "value": sum(all_gather(dist, value))}


if __name__ == "__main__":
    with ExitStack() as nodes:
        take_runs(functools.partial(start, nodes))
