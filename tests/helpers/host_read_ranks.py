"""Run by two ranks: find the code that reads device values on the CPU in an optimizer step, under each layout.

    mpiexec -n 2 python3 tests/helpers/host_read_ranks.py FOLDER ddp fsdp2 zero1 zero1+unfused …

Rank 0 writes FOLDER/results.json: for each run, the lines that read, {"ours": […], "others": […]}. A read is
attributed to the innermost stack frame of this package ("ours") or of DeepSpeed ("others").
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rank_jobs import sequences, take_runs

from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.torch_internals import TorchDispatchMode
from ezpz_llm.training.engine.build import assemble, build_engine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.init import decay_groups
from ezpz_llm.training.model.loss import configure_head

aten = torch.ops.aten
READS = (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default)
"""Operators that wait for the device."""
OURS, DEEPSPEEDS = (str(Path(str(find_spec(name).origin)).parent) for name in ("ezpz_llm", "deepspeed"))
LENGTH, ACCUMULATION = 32, 2


class Reads(TorchDispatchMode):
    """Dispatch mode that records the lines that read."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[str]] = {"ours": [], "others": []}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            frame: Any = sys._getframe(1)
            while frame and not frame.f_code.co_filename.startswith((OURS, DEEPSPEEDS)):
                frame = frame.f_back
            place = frame.f_code.co_filename if frame else "nobody's"
            whose = "others" if place.startswith(DEEPSPEEDS) else "ours"
            self.found[whose].append(f"{Path(place).name}:{frame.f_lineno if frame else 0}")
        return func(*args, **(kwargs or {}))


def read(dist: Dist, run: str) -> dict[str, list[str]]:
    """Train three steps and record the reads of the last two. The third measures norms, as on log lines."""
    layout, *options = run.split("+")
    config = replace(get_model_config("tiny-llama", n_layer=2, n_embd=32, n_head=4, n_kv_head=2, block_size=LENGTH),
                     tied="untied" not in options)
    resolved = resolve(Request(layout, world_size=dist.world_size, micro_batch=2, accumulation=ACCUMULATION,
                               clip=1.0, precision="bf16_autocast" if "autocast" in options else "bf16",
                               device="cpu", model=config,
                               optimizer="adamw_unfused" if "unfused" in options else "adamw"))
    plan = resolved.layout
    dist.arrange(tp=plan.tp, pp=plan.pp, sp=plan.sp)
    model = assemble(config, plan, dist.mesh, 1337)
    configure_head(model, None, 0.0)
    engine = build_engine(model, resolved, dist, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                          param_groups=decay_groups(model, 0.1))
    rows = sequences(0, 2 * ACCUMULATION, LENGTH + 1).chunk(ACCUMULATION)
    samples = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in rows]
    reads = Reads()
    for step in range(3):
        if step == 2:
            engine.step_skip.measure(engine.training_state())
        with reads if step else nullcontext():
            engine.train_step(samples, 1e-3, lambda phase: nullcontext())
    return reads.found


if __name__ == "__main__":
    take_runs(read)
