"""Run by several ranks: 8-bit AdamW under several layouts, and resuming from its checkpoints.

    mpiexec -n 2 python3 tests/helpers/eight_bit_ranks.py FOLDER ddp zero1 zero2 zero3 fsdp2

Rank 0 writes FOLDER/results.json. For each layout: the losses, the losses after a resume (under the same layout and
under ddp with fp32 moments) next to those without a resume, the bytes of both moments, and the number of
calls that provide moments in fp32 to measure a step.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tensor_parallel_ranks import ACCUMULATION, BLOCK, CLIP, GLOBAL_BATCH, VOCABULARY, train

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training import checkpoint
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.build import assemble, build_engine
from ezpz_llm.training.layout.optimizers import OPTIMIZERS
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.init import decay_groups

# Large enough that half of a matrix is still quantized.
CONFIG = get_model_config("tiny-gpt2", n_layer=2, n_embd=64, block_size=BLOCK, vocab_size=VOCABULARY)


def make(dist: Dist, layout: str, optimizer: str, seed: int = 7) -> Engine:
    resolved = resolve(Request(layout, world_size=dist.world_size, clip=CLIP, global_batch=GLOBAL_BATCH,
                               model=CONFIG, accumulation=ACCUMULATION, precision="fp32", device="cpu",
                               optimizer=optimizer))
    dist.arrange()
    model = assemble(CONFIG, resolved.layout, dist.mesh, seed)
    return build_engine(model, resolved, dist, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                        param_groups=decay_groups(model, 0.1))


def state_bytes(engine: Engine) -> int:
    """Return the bytes of this rank's optimizer state, without step counts and quantization maps."""
    inner = engine.training_state()
    optimizer: Any = inner.zero.optimizer if hasattr(inner, "zero") else inner.optimizer
    return sum(value.numel() * value.element_size() for state in optimizer.state.values()
               for name, value in state.items() if isinstance(value, torch.Tensor) and "qmap" not in name)


def values(engine: Engine) -> list[torch.Tensor]:
    return [tensor.clone() for piece in engine.training_state().slices() for tensor in piece.tensors.values()]


def fp32_copies(engine: Engine) -> int:
    """Return the number of calls that provide moments in fp32 to measure the norms of a step."""
    spec = type(OPTIMIZERS["adamw_8bit"])
    with mock.patch.object(spec, "in_fp32", autospec=True, side_effect=spec.in_fp32) as copied:
        engine.step_skip.measure(engine.training_state())
    return copied.call_count


def examine(dist: Dist, layout: str, folder: Path) -> dict[str, Any]:
    plain = make(dist, layout, "adamw")
    expected = train(plain, dist, 0, 6)[0]
    plain_bytes = state_bytes(plain)
    engine = make(dist, layout, "adamw_8bit")
    losses = train(engine, dist, 0, 3)[0]
    before, twice = values(engine), values(engine)
    saved = checkpoint.save(engine, dist, RunDir(folder / layout), checkpoint.Progress(step=3))
    result: dict[str, Any] = {"plain": expected, "bytes": [state_bytes(engine), plain_bytes],
                              "reading changes nothing": all(map(torch.equal, before, twice))}
    result["fp32 copies"] = fp32_copies(engine)
    ahead = train(engine, dist, 3, 6)[0]
    for other, optimizer in ((layout, "adamw_8bit"), ("ddp", "adamw")):
        engine = make(dist, other, optimizer, seed=8)
        checkpoint.load(saved, engine, dist)
        if other == layout:
            apart = [(a - b).abs().max().item() for a, b in zip(before, values(engine), strict=True)]
            result["restored"] = max(apart)
        result[f"{other} {optimizer}"] = [train(engine, dist, 3, 6)[0], ahead]
        gc.collect()
    return {**result, "losses": losses + ahead}


def main() -> None:
    folder = Path(sys.argv[1])
    dist = setup(device="cpu", run_dir=folder / "run")
    results = {layout: examine(dist, layout, folder) for layout in sys.argv[2:]}
    if dist.is_main:
        (folder / "results.json").write_text(json.dumps(results))
    dist.close()


if __name__ == "__main__":
    main()
