"""Run by several ranks: train tiny models under tensor parallelism and compare with one process.

    mpiexec -n 2 python3 tests/helpers/tensor_parallel_ranks.py FOLDER fp32:gpt2:tp2_zero1 bf16_autocast:llama:ddp …

A run may end in `:undivided` (the layout without tensor parallelism), `:unmarked` (an injected fault), or
`:qk_norm` (a model with parameters defined outside the package; with `:unsummed`, under a wrong rule). The run
`parts` checks initial weights, loss, dropout and checkpoints instead. Rank 0 writes FOLDER/results.json.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from qk_norm import qk_norm
from torch import Tensor, nn

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training import checkpoint
from ezpz_llm.training.dist import Degrees, Dist, Mesh
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.build import assemble, build_engine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import ModelConfig, get_model_config
from ezpz_llm.training.model.embedding import Columns
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import decay_groups, init_weights
from ezpz_llm.training.model.loss import Head
from ezpz_llm.training.model.parameters import placement_of, size, whole_box
from ezpz_llm.training.model.recomputation import recompute_blocks
from ezpz_llm.training.model.tensor_parallel import RankedDropout

STEPS, GLOBAL_BATCH, ACCUMULATION, CLIP, BLOCK, VOCABULARY = 6, 8, 2, 0.5, 32, 60
_SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": BLOCK, "vocab_size": VOCABULARY}
CONFIGS = {"gpt2": get_model_config("tiny-gpt2", **_SMALL),
           "gpt2_normed": get_model_config("tiny-gpt2", **_SMALL, qk_norm="head"),
           "llama": get_model_config("tiny-llama", **_SMALL, n_kv_head=2, intermediate_size=96, tied=False),
           "qwen3": get_model_config("tiny-qwen3", **_SMALL, intermediate_size=96),
           "olmo2": get_model_config("tiny-olmo2", **_SMALL, intermediate_size=96),
           # Llama 3.2's RoPE scaling: some frequencies are kept, some slowed, some interpolated.
           "slowed": get_model_config("tiny-llama", **_SMALL, n_kv_head=2, intermediate_size=96, rope_theta=50.0,
                                      rope_factor=8.0, rope_context=16)}


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return (GLOBAL_BATCH, BLOCK) tokens with two possible successors per symbol; some targets are ignored."""
    generator = torch.Generator().manual_seed(step)
    rows = [torch.randint(0, VOCABULARY, (GLOBAL_BATCH,), generator=generator)]
    for choice in torch.randint(0, 2, (BLOCK, GLOBAL_BATCH), generator=generator):
        rows.append((5 * rows[-1] + 7 * choice + 1) % VOCABULARY)
    sequences = torch.stack(rows, dim=1)
    targets = sequences[:, 1:].clone()
    targets[:, -2:] = -100
    return sequences[:, :-1], targets


def make_engine(dist: Dist, layout: str, tp: int, config: ModelConfig, precision: str, seed: int = 1337) -> Engine:
    resolved = resolve(Request(layout, world_size=dist.world_size, clip=CLIP, global_batch=GLOBAL_BATCH,
                               accumulation=ACCUMULATION, precision=precision, tp=tp))
    dist.arrange(tp=tp)
    model = assemble(config, resolved.layout, dist.mesh, seed)
    return build_engine(model, resolved, dist, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                        param_groups=decay_groups(model, 0.1))


def train(engine: Engine, dist: Dist, first: int, last: int) -> tuple[list[float], list[float]]:
    """Train steps [first, last). Return losses and gradient norms."""
    losses, norms = [], []
    for step in range(first, last):
        mine = [part.chunk(dist.mesh.dp_size)[dist.mesh.dp_rank].chunk(ACCUMULATION) for part in batch(step)]
        loss, norm = engine.train_step(zip(*mine, strict=True), 5e-4 * (1 + math.cos(math.pi * step / STEPS)),
                                       lambda phase: nullcontext())
        losses.append(mean(loss, dist))
        norms.append(norm.item())
    return losses, norms


def mean(value: Tensor, dist: Dist) -> float:
    value = value.detach().double().clone()
    if dist.world_size > 1:
        torch_dist.all_reduce(value)
    return value.item() / dist.world_size


def everyone(value: Any) -> list[Any]:
    values = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(values, value)
    return values


def evaluated(engine: Engine) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a batch, and the logits after it."""
    tokens, targets = batch(1000)
    with engine.evaluating():
        return engine.loss_sum(tokens, targets), engine.next_logits(tokens)


def compare(dist: Dist, alone: Dist, run: str, cache: dict[str, Any]) -> dict[str, Any]:
    """Compare a layout with one process: losses and norms of every step, then the evaluation."""
    precision, shape, layout, *options = run.split(":")
    if "qk_norm" in options:
        with qk_norm("replicated" if "unsummed" in options else "summed"):
            return compared(dist, alone, (precision, shape, layout, *options), cache)
    return compared(dist, alone, (precision, shape, layout, *options), cache)


def compared(dist: Dist, alone: Dist, run: tuple[str, ...], cache: dict[str, Any]) -> dict[str, Any]:
    precision, shape, layout, *options = run
    config = CONFIGS[shape]
    reference = f"{precision}:{shape}:{'qk_norm' in options}"
    if reference not in cache:
        engine = make_engine(alone, "ddp", 1, config, precision)
        losses, norms = train(engine, alone, 0, STEPS)
        cache[reference] = (losses, norms, *evaluated(engine))
    tp = 1 if "undivided" in options else 2
    engine = make_engine(dist, layout, tp, config, precision)
    if "unmarked" in options:
        for parameter in engine.module.parameters():
            parameter.tensor_model_parallel = False
    losses, norms = train(engine, dist, 0, STEPS)
    loss_sum, logits = evaluated(engine)
    expected = cache[reference]
    return {"losses": [losses, expected[0]], "norms": [norms, expected[1]],
            "norms agree": len(set(map(tuple, everyone(norms)))) == 1,
            "loss_sum": [loss_sum.item(), expected[2].item()],
            "loss_sum agrees": len(set(everyone(loss_sum.item()))) == 1,
            "logits": (logits.float() - expected[3].float()).abs().max().item(),
            "logits shape": list(logits.shape),
            "logits agree": all(torch.equal(logits, other) for other in everyone(logits)),
            "replicated agree": tp == 1 or replicated_agree(engine)}


def replicated_agree(engine: Engine) -> bool:
    """Return True if parameters replicated over tensor-parallel peers are bit-identical."""
    mine = {(piece.name, piece.start): piece.tensors["weight"].clone() for piece in engine.training_state().slices()
            if piece.box == whole_box(piece.shape)}
    held = everyone(mine)
    first = torch_dist.get_rank() // 2 * 2
    same = all(torch.equal(tensor, held[rank][key]) for key, tensor in mine.items() for rank in (first, first + 1))
    return all(everyone(same)) and any(held)


def initial_weights(dist: Dist) -> dict[str, bool]:
    """Check that each rank's initial weights are slices of the plain model's, and cover it exactly once.

    Also check the logits of all tokens.
    """
    result = {}
    for shape, config in CONFIGS.items():
        plain = GPT(config)
        init_weights(plain, config, 7)
        expected = dict(plain.named_parameters())
        model = assemble(config, resolve(Request("tp2", world_size=2, tp=2, precision="fp32")).layout, dist.mesh, 7)
        counts: Counter[str] = Counter()
        result[f"{shape} same"] = True
        for name, parameter in model.named_parameters():
            at = placement_of(name, parameter)
            boxes = [expected[at.name][tuple(slice(*side) for side in box)].flatten() for box in at.boxes]
            result[f"{shape} same"] &= torch.equal(parameter.flatten(), torch.cat(boxes)) and at.name == name
            counts[name] += sum(map(size, at.boxes)) * at.primary
        total = sum(map(Counter, everyone(dict(counts))), Counter())
        result[f"{shape} once"] = total == Counter({name: value.numel() for name, value in expected.items()})
        result[f"{shape} divided"] = max(p.numel() for p in model.parameters()) * 2 == max(
            p.numel() for p in expected.values())
        tokens = batch(0)[0]
        expected_logits = plain(tokens)
        # Terms of a sum may cancel, so the roundings are relative to the largest logit.
        bound = 64 * 2**-24 * expected_logits.abs().max()
        result[f"{shape} logits"] = bool((model(tokens) - expected_logits).abs().max() <= bound)
    return result


def losses(dist: Dist) -> dict[str, list[float]]:
    """Compare the vocabulary-parallel loss with the plain one: largest differences of value and gradients."""
    torch.manual_seed(0)
    weight, hidden, targets = 2 * torch.randn(20, 6), torch.randn(3, 7, 6), torch.randint(20, (3, 7))
    targets[0, 2:5], targets[2] = -100, -100
    result = {}
    for dtype, reduction, chunk, z_loss in itertools.product(
            (torch.float32, torch.bfloat16), ("mean", "sum"), (0, 4, 21), (0.0, 0.1)):
        plain, mine = Head(6, 20), Head(6, 10, Columns(dist.rank, 2))
        outputs = []
        for head, rows, tokens in ((plain, weight, 0), (mine, weight.chunk(2)[dist.rank], chunk)):
            head.weight.data, head.loss_chunk, head.z_loss = rows.clone(), tokens, z_loss
            x = hidden.clone().requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = head(x, targets, reduction)
            (loss * 3).backward()
            outputs.append((loss.item(), x.grad, head.weight.grad))
        (value, for_hidden, for_weight), (other, part, rows) = outputs
        torch.distributed.all_reduce(part)
        apart = [(for_weight.chunk(2)[dist.rank] - rows).abs().max() / for_weight.abs().max(),
                 (for_hidden - part).abs().max() / for_hidden.abs().max()]
        result[f"{dtype} {reduction} {chunk} {z_loss}"] = [abs(value - other) / value, max(apart).item()]
    nothing = torch.full((3, 7), -100)
    result["nothing"] = [mine(hidden, nothing, "sum").item(), float(mine(hidden, nothing, "mean").isnan())]
    return result


def dropout(dist: Dist) -> dict[str, bool]:
    """Check dropout masks: equal for replicated tensors, different for sharded heads, repeated on recomputation."""
    config = replace(CONFIGS["gpt2"], dropout=0.3)
    layout = resolve(Request("tp2", world_size=2, tp=2, precision="fp32")).layout
    model = assemble(config, layout, dist.mesh, 7)
    product = model.transformer["h"][0].attn.product
    outputs: dict[str, Tensor] = {}
    handles = [module.register_forward_hook(lambda _, inputs, output, name=name: outputs.update({name: output}))
               for name, module in model.named_modules() if isinstance(module, nn.Dropout)]
    torch.manual_seed(3)
    loss = model(*batch(0))
    loss.backward()
    result = {f"{name} alike": same(output.detach()) for name, output in outputs.items()}
    result["some dropped"] = all(bool((output == 0).any()) for output in outputs.values())
    for handle in handles:
        handle.remove()
    heads = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    here = product(heads, heads, heads)
    result["attention differs"] = isinstance(product, RankedDropout) and not same(here)
    result["generators alike"] = same(torch.get_rng_state())
    torch.manual_seed(3)
    result["attention repeats"] = torch.equal(here, product(heads, heads, heads))
    result["attention moves on"] = not torch.equal(here, product(heads, heads, heads))
    model.eval()
    result["none in evaluation"] = same(product(heads, heads, heads)) and same(model(*batch(0)).detach())
    again = assemble(config, layout, dist.mesh, 7)
    recompute_blocks(again, 1)
    torch.manual_seed(3)
    repeated = again(*batch(0))
    repeated.backward()
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    result["recomputed"] = torch.equal(loss, repeated) and all(torch.equal(p.grad, q.grad) for p, q in pairs)
    placed = {p: placement_of(name, p) for name, p in model.named_parameters()}
    result["replicated gradients alike"] = all(same(p.grad) for p, at in placed.items()
                                               if at.boxes == (whole_box(at.shape),))
    return result


def same(tensor: Tensor) -> bool:
    """Return True if a tensor is bit-identical on every rank."""
    return all(torch.equal(tensor, other) for other in everyone(tensor))


def checkpoints(folder: Path, dist: Dist, alone: Dist) -> dict[str, list[list[float]]]:
    """Return losses after a checkpoint: of the continued run, and of another layout that resumes it."""
    config, run_dirs = CONFIGS["gpt2"], {name: RunDir(folder / name) for name in ("tp2_zero1", "alone")}
    engine = make_engine(dist, "tp2_zero1", 2, config, "fp32")
    train(engine, dist, 0, 3)
    checkpoint.save(engine, dist, run_dirs["tp2_zero1"], checkpoint.Progress(step=3, consumed=3 * GLOBAL_BATCH))
    whole_run = train(engine, dist, 3, STEPS)[0]
    result = {}
    if dist.is_main:
        engine = make_engine(alone, "ddp", 1, config, "fp32", seed=2)
        checkpoint.load(checkpoint.find(run_dirs["tp2_zero1"].path), engine, alone)
        result["tp2_zero1 -> one process"] = [whole_run, train(engine, alone, 3, STEPS)[0]]
        engine = make_engine(alone, "ddp", 1, config, "fp32")
        train(engine, alone, 0, 3)
        checkpoint.save(engine, alone, run_dirs["alone"], checkpoint.Progress(step=3, consumed=3 * GLOBAL_BATCH))
        whole_run = train(engine, alone, 3, STEPS)[0]
    dist.barrier()
    for layout in ("tp2", "tp2_zero1", "tp2_zero3"):
        engine = make_engine(dist, layout, 2, config, "fp32", seed=2)
        checkpoint.load(checkpoint.find(run_dirs["alone"].path), engine, dist)
        result[f"one process -> {layout}"] = [whole_run, train(engine, dist, 3, STEPS)[0]]
    return result


def parts(folder: Path, dist: Dist, alone: Dist) -> dict[str, Any]:
    dist.arrange(tp=2)
    return {"initial weights": everyone(initial_weights(dist)), "loss": everyone(losses(dist)),
            "dropout": everyone(dropout(dist)), "checkpoints": checkpoints(folder, dist, alone)}


def main() -> None:
    folder, runs = Path(sys.argv[1]), sys.argv[2:]
    with setup(device="cpu", run_dir=folder / "run") as dist:
        alone = Dist(RankInfo(0, 1, 0, 1, 0, "test"), dist.device, None, Mesh(Degrees(1), 0), dist.run_dir)
        results: dict[str, Any] = {}
        cache: dict[str, Any] = {}
        for run in runs:
            results[run] = parts(folder, dist, alone) if run == "parts" else compare(dist, alone, run, cache)
            gc.collect()
        if dist.is_main:
            (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
