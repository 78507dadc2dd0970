"""Run by four ranks: skipped steps and measured norms under each layout.

    mpiexec -n 4 python3 tests/helpers/step_skip_ranks.py FOLDER ddp zero2:adamw_unfused zero1::bf16 pp2_tp2 …

The reference is plain torch in every process. Rank 0 writes FOLDER/<layout>.json.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from rank_jobs import sequences

from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.build import assemble, build_engine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import decay_groups, init_weights

GLOBAL_BATCH, ACCUMULATION, CLIP, LR, DECAY = 8, 2, 0.5, 3e-3, 0.1
CONFIG = replace(get_model_config("tiny-gpt2", n_layer=2, n_head=2, n_embd=32, block_size=32), vocab_size=64)
MEASURED = 2
"""The step whose norms are compared: the third, so that the optimizer has moments."""


def truth() -> dict[str, float]:
    """Return the norms of step MEASURED, computed from their definition."""
    model = GPT(CONFIG)
    init_weights(model, CONFIG, 1337)
    groups = decay_groups(model, DECAY)
    optimizer = torch.optim.AdamW([{k: g[k] for k in ("params", "weight_decay")} for g in groups], lr=LR,
                                  betas=(0.9, 0.95))
    for step in range(MEASURED + 1):
        data = sequences(step, GLOBAL_BATCH, CONFIG.block_size + 1)
        optimizer.zero_grad()
        model(data[:, :-1], data[:, 1:]).backward()
        norms = {}
        for name, group in zip(("decayed", "others"), groups, strict=True):
            norms[f"grad_norm_{name}"] = norm([p.grad for p in group["params"]])
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        before = [[p.detach().clone() for p in group["params"]] for group in groups]
        optimizer.step()
        for name, group, old in zip(("decayed", "others"), groups, before, strict=True):
            change = [p.detach() - q for p, q in zip(group["params"], old, strict=True)]
            norms[f"update_ratio_{name}"] = norm(change) / norm(old)
    return norms


def norm(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


class Run:
    """An engine and its training steps."""

    def __init__(self, dist: Dist, name: str) -> None:
        layout, optimizer, precision = (name + "::").split(":")[:3]
        resolved = resolve(Request(layout, optimizer=optimizer or "adamw", world_size=dist.world_size, clip=CLIP,
                                   global_batch=GLOBAL_BATCH, model=CONFIG, accumulation=ACCUMULATION,
                                   precision=precision or "fp32", device="cpu"))
        chosen = resolved.layout
        dist.arrange(tp=chosen.tp, pp=chosen.pp, sp=chosen.sp)
        model = assemble(CONFIG, chosen, dist.mesh, 1337)
        self.dist = dist
        self.engine: Engine = build_engine(model, resolved, dist, lr=LR, betas=(0.9, 0.95), eps=1e-8,
                                           param_groups=decay_groups(model, DECAY))
        self.factor = 1.0
        inner = self.engine.module.forward
        self.engine.module.forward = lambda *args, **kwargs: self.poison(inner(*args, **kwargs))

    def poison(self, output: torch.Tensor) -> torch.Tensor:
        """Multiply the loss, or a stage's activations, by the factor, on the last rank only."""
        return output * self.factor if self.dist.rank == self.dist.world_size - 1 else output

    def step(self, number: int) -> torch.Tensor:
        data = sequences(number, GLOBAL_BATCH, CONFIG.block_size + 1)
        mine = data.chunk(self.dist.mesh.dp_size)[self.dist.mesh.dp_rank].chunk(ACCUMULATION)
        return self.engine.train_step(((part[:, :-1], part[:, 1:]) for part in mine), LR,
                                      lambda phase: nullcontext())[1]

    def measured(self, number: int) -> dict[str, float]:
        step_skip = self.engine.step_skip
        step_skip.measure(self.engine.training_state())
        total = self.step(number)
        norms = step_skip.measured()
        torch.distributed.all_reduce(norms.sums)
        return norms.describe(norms.sums.tolist(), total.item())

    def state(self) -> tuple[list[torch.Tensor], int]:
        state = self.engine.training_state()
        return [t.clone() for piece in state.slices() for t in piece.tensors.values()], state.optimizer_step

    def skipped(self, number: int) -> bool:
        """Run a step. Return True if it left the state unchanged on every rank."""
        before, steps = self.state()
        self.step(number)
        after, steps_after = self.state()
        same = steps == steps_after and all(map(torch.equal, before, after))
        agreed = torch.tensor(float(same))
        torch.distributed.all_reduce(agreed)
        return agreed.item() == self.dist.world_size


def examine(dist: Dist, layout: str) -> dict:
    run = Run(dist, layout)
    for number in range(MEASURED):
        run.step(number)
    result = run.measured(MEASURED)
    run.engine.step_skip.limit = 1e-6
    result["too large"] = run.skipped(3)
    run.engine.step_skip.limit = math.inf
    for run.factor, outcome in ((math.nan, "not a number"), (1e30, "infinite")):
        result[outcome] = run.skipped(4)
    run.factor, run.engine.step_skip.limit = 1.0, 1e3
    result["fine"] = not run.skipped(5)
    with run.engine.evaluating():
        data = sequences(6, GLOBAL_BATCH, CONFIG.block_size + 1)
        loss = run.engine.loss_sum(data[:, :-1], data[:, 1:])
    result["sound"] = bool(torch.isfinite(loss))
    return result


def main() -> None:
    folder, layouts = Path(sys.argv[1]), sys.argv[2:]
    with setup(device="cpu", run_dir=folder / "run") as dist:
        expected = truth()
        for layout in layouts:
            result = {"expected": expected, **examine(dist, layout)}
            if dist.is_main:
                (folder / f"{layout}.json").write_text(json.dumps(result))
                print(layout, result, flush=True)
            gc.collect()


if __name__ == "__main__":
    main()
