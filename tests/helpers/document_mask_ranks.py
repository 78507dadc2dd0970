"""Run by several ranks: train tiny models with masks between documents, and compare with one process.

    mpiexec -n 2 python3 tests/helpers/document_mask_ranks.py DIR fp32:llama:pp2 fp32:gpt2:zero1,sp2:recompute …

Degrees may follow a layout, separated by commas. Options: `recompute`, and the injected faults `unmasked` (no rank
masks) and `first_only` (only the first stage of a pipeline masks). Rank 0 writes DIR/results.json.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rank_jobs import take_runs
from tensor_parallel_ranks import (
    ACCUMULATION,
    CLIP,
    CONFIGS,
    GLOBAL_BATCH,
    batch,
    everyone,
    train,
)

from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training.dist import Degrees, Dist, Mesh
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.build import assemble, build_engine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.document_mask import mask_documents
from ezpz_llm.training.model.init import decay_groups, initial_values
from ezpz_llm.training.model.recomputation import recompute_blocks

STEPS, SEPARATOR = 3, 8
"""The separator is one in 24 tokens of `batch`, of which a sequence has 32."""


def make_engine(dist: Dist, precision: str, shape: str, layout: str, options: tuple[str, ...] = ()) -> Engine:
    """Build the engine of a layout, whose model masks other documents."""
    name, *degrees = layout.split(",")
    config = replace(CONFIGS[shape], n_layer=4)  # with pp 4, two stages load no micro-batches
    resolved = resolve(Request(name, world_size=dist.world_size, clip=CLIP, global_batch=GLOBAL_BATCH, model=config,
                               accumulation=ACCUMULATION, precision=precision, device="cpu",
                               **{degree[:2]: int(degree[2:]) for degree in degrees}))
    chosen = resolved.layout
    dist.arrange(tp=chosen.tp, pp=chosen.pp, sp=chosen.sp)
    drawn = initial_values(config, 1337)
    # Otherwise attention hardly changes the loss of an untrained model.
    model = assemble(config, chosen, dist.mesh, 1337, weights=lambda parameter, box: drawn(parameter, box) * (
        10 if parameter.endswith("attn.c_proj.weight") else 1))
    is_masked = "unmasked" not in options and ("first_only" not in options or dist.mesh.pp_rank == 0)
    mask_documents(model, SEPARATOR if is_masked else None)
    recompute_blocks(model, int("recompute" in options))
    return build_engine(model, resolved, dist, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                        param_groups=decay_groups(model, 0.1))


def measured(engine: Engine, dist: Dist) -> tuple[list[float], list[float], float, list[float]]:
    """Train STEPS steps; return losses, norms, and the summed loss and each row's loss on this rank."""
    losses, norms = train(engine, dist, 0, STEPS)
    tokens, targets = batch(1000)
    with engine.evaluating():
        return losses, norms, engine.loss_sum(tokens, targets).item(), engine.row_losses(tokens, targets).tolist()


EXPECTED: dict[tuple[str, str], Any] = {}
"""Results of one process by precision and shape."""


def expected(dist: Dist, precision: str, shape: str) -> tuple[list[float], list[float], float, list[float]]:
    """Return the results of one process."""
    if (precision, shape) not in EXPECTED:
        alone = Dist(RankInfo(0, 1, 0, 1, 0, "test"), dist.device, None, Mesh(Degrees(1), 0), dist.run_dir)
        EXPECTED[precision, shape] = measured(make_engine(alone, precision, shape, "ddp"), alone)
    return EXPECTED[precision, shape]


def compare(dist: Dist, run: str) -> dict[str, Any]:
    """Return pairs of a layout's results and those of one process."""
    precision, shape, layout, *options = run.split(":")
    losses, norms, loss_sum, rows = measured(make_engine(dist, precision, shape, layout, tuple(options)), dist)
    of_one = expected(dist, precision, shape)
    # Tensor- and data-parallel ranks compute the same evaluation, the others a part of it.
    copies = dist.mesh.size("dp", "tp")
    sums, all_rows = everyone(loss_sum), everyone(rows)
    return {"losses": [losses, of_one[0]], "norms": [norms, of_one[1]],
            "evaluated": [[sum(sums) / copies, *(sum(row) / copies for row in zip(*all_rows, strict=True))],
                          [of_one[2], *of_one[3]]]}


if __name__ == "__main__":
    take_runs(compare)
