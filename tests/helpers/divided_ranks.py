"""Run by several ranks: tiny models under fsdp2, sequence parallelism and tiles, compared with one process.

    mpiexec -n 2 python3 tests/helpers/divided_ranks.py DIR fp32:gpt2:fsdp2 bf16_autocast:llama:zero3,sp2 …

Degrees may follow a layout, separated by commas. The run `checkpoints` resumes checkpoints of one layout under
another. Rank 0 writes FOLDER/results.json.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from tensor_parallel_ranks import (
    ACCUMULATION,
    BLOCK,
    CLIP,
    CONFIGS,
    GLOBAL_BATCH,
    STEPS,
    batch,
    evaluated,
    everyone,
    train,
)
from torch import Tensor, nn

from ezpz_llm.core.base.package_data import data_dir
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training import checkpoint
from ezpz_llm.training.dist import Degrees, Dist, Mesh
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.build import assemble, build_engine
from ezpz_llm.training.layout.precision_recipes import FP32_GRADIENTS, GradientDtypes
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import ModelConfig, get_model_config
from ezpz_llm.training.model.init import decay_groups

# In "odd", only the width is divisible by 2 or 4 ranks or tiles; rows and columns are not.
SHAPES = {**CONFIGS, "odd": get_model_config("tiny-llama", n_layer=2, n_head=2, n_kv_head=1, n_embd=20,
                                             block_size=BLOCK, vocab_size=61, vocab_multiple=1,
                                             intermediate_size=31),
          "wide": get_model_config("tiny-llama", n_layer=2, block_size=BLOCK, vocab_size=60)}


def make_engine(dist: Dist, name: str, config: ModelConfig, precision: str, seed: int = 1337,
                gradients: GradientDtypes = FP32_GRADIENTS, global_batch: int = GLOBAL_BATCH) -> Engine:
    layout, *degrees = name.split(",")
    resolved = resolve(Request(layout, world_size=dist.world_size, clip=CLIP, global_batch=global_batch,
                               model=config, accumulation=ACCUMULATION, precision=precision, device="cpu",
                               grad_accum_dtype=gradients.accumulated, reduce_dtype=gradients.reduced,
                               **{degree[:2]: int(degree[2:]) for degree in degrees}))
    chosen = resolved.layout
    dist.arrange(tp=chosen.tp, pp=chosen.pp, sp=chosen.sp)
    model = assemble(config, chosen, dist.mesh, seed)
    return build_engine(model, resolved, dist, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                        param_groups=decay_groups(model, 0.1))


def compare(dist: Dist, alone: Dist, run: str, cache: dict[str, Any]) -> dict[str, Any]:
    """Compare a layout with one process: losses and norms of every step, then the evaluation."""
    precision, shape, layout, *options = run.split(":")
    config, reference = SHAPES[shape], f"{precision}:{shape}"
    if reference not in cache:
        engine = make_engine(alone, "ddp", config, precision)
        cache[reference] = (*train(engine, alone, 0, STEPS), *evaluated(engine), after_some(engine))
    if "small" in options:
        layout = small_thresholds(layout, dist)
    engine = make_engine(dist, layout, config, precision)
    peak = count_gathered(engine.module)
    if "summed" in options:
        inner = engine.module.forward
        engine.module.forward = lambda *args, **kwargs: inner(*args, **kwargs) * dist.mesh.sp_size
    losses, norms = train(engine, dist, 0, STEPS)
    loss_sum, logits = evaluated(engine)
    parts: Counter[int] = Counter()
    for place, tp_rank, part in everyone((dist.mesh.dp_rank, dist.mesh.tp_rank, loss_sum.item())):
        parts[place] += part if tp_rank == 0 else 0.0
    expected = cache[reference]
    apart = (logits.float() - expected[3].float()).abs().max() / expected[3].abs().max()
    return {"losses": [losses, expected[0]], "norms": [norms, expected[1]],
            "norms agree": len(set(map(tuple, everyone(norms)))) == 1,
            "loss_sum": [parts[0], expected[2].item()], "loss_sums agree": len(set(parts.values())) == 1,
            "logits": apart.item(), "logits shape": list(logits.shape),
            "short": (after_some(engine) - expected[4]).abs().max().item(), "gathered": peak[0]}


def after_some(engine: Engine) -> Tensor:
    """Return the logits after 1, 7 and 31 tokens: shorter than the context, and not divisible by the ranks."""
    tokens, _ = batch(1001)
    with engine.evaluating():
        return torch.stack([engine.next_logits(tokens[:, :count]).float() for count in (1, 7, 31)])


def small_thresholds(layout: str, dist: Dist) -> str:
    """Write the ds_config with zero thresholds, so that even small parameters are released after each use."""
    values = json.loads((data_dir("ds_configs") / f"{layout}.json").read_text())
    values["zero_optimization"].update(stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=0,
                                       stage3_max_reuse_distance=0)
    path = dist.run_dir.path / f"rank{dist.rank}" / f"{layout}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(values))
    return str(path)


def count_gathered(module: nn.Module) -> list[int]:
    """Track the peak number of gathered parameter elements of the blocks during forward passes."""
    peak, parameters = [0], [parameter for name, parameter in module.named_parameters() if ".h." in name]

    def update_peak(*_: Any) -> None:
        peak[0] = max(peak[0], sum(parameter.ds_numel for parameter in parameters
                                   if parameter.ds_status == ZeroParamStatus.AVAILABLE))

    if hasattr(parameters[0], "ds_status"):
        for part in module.modules():
            if isinstance(part, nn.Linear):
                part.register_forward_pre_hook(update_peak)  # runs after DeepSpeed's hook, which gathers
    return peak


def checkpoints(folder: Path, dist: Dist) -> dict[str, Any]:
    """Return the losses after resuming under another layout, next to those of the original run."""
    result = {}
    for saved, loaded in (("fsdp2", "ddp"), ("zero1", "fsdp2"), ("tiled", "ddp"), ("ddp", "tiled"),
                          ("zero1,sp2", "fsdp2")):
        config = SHAPES["llama" if "sp2" in saved else "odd"]
        engine = make_engine(dist, saved, config, "fp32")
        train(engine, dist, 0, 3)
        run_dir = RunDir(folder / f"{saved}-{loaded}")
        saved_folder = checkpoint.save(engine, dist, run_dir,
                                       checkpoint.Progress(step=3, consumed=3 * GLOBAL_BATCH, sample_hash=""))
        expected = train(engine, dist, 3, 6)[0]
        engine = make_engine(dist, loaded, config, "fp32", seed=2)
        evaluated(engine)  # may leave parameters gathered; loading must replace these values too
        checkpoint.load(saved_folder, engine, dist)
        result[f"{saved} -> {loaded}"] = [train(engine, dist, 3, 6)[0], expected]
    return result


def main() -> None:
    folder, runs = Path(sys.argv[1]), sys.argv[2:]
    results: dict[str, Any] = {}
    cache: dict[str, Any] = {}
    with setup(device="cpu", run_dir=folder / "run") as dist:
        alone = Dist(RankInfo(0, 1, 0, 1, 0, "test"), dist.device, None, Mesh(Degrees(1), 0), dist.run_dir)
        for run in runs:
            results[run] = checkpoints(folder, dist) if run == "checkpoints" else compare(dist, alone, run, cache)
            gc.collect()
            if dist.is_main:
                print(run, flush=True)
        if dist.is_main:
            (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
