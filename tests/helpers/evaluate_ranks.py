"""Run by several ranks: evaluate, sample and train models from Hugging Face folders under each given layout.

    mpiexec -n 2 python3 tests/helpers/evaluate_ranks.py FOLDER gpt2:zero3 llama:pp2 …

FOLDER holds the models by name, and items.jsonl. Rank 0 writes FOLDER/results.json. Each run also saves a
checkpoint after two steps, in FOLDER/<model>-<layout>/checkpoints, which the test exports.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training import checkpoint
from ezpz_llm.training.data.tokenizers import get_tokenizer, to_entry
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.evaluate.generation import generate
from ezpz_llm.training.evaluate.hellaswag import read_items, score
from ezpz_llm.training.evaluate.model import ModelPlan, add_arguments, open_model, plan_model
from ezpz_llm.training.evaluate.sampling import sample
from ezpz_llm.training.evaluate.validation import validation_loss

BLOCK, MICRO_BATCH, SEQUENCES = 64, 2, 10
PROMPT = (72, 101, 108, 108, 111)
SAMPLE = {"new_tokens": 12, "block_size": BLOCK, "vocab_size": 257, "top_k": 20, "temperature": 0.8}

GENERATE = argparse.Namespace(seed=1, samples=2, batch=1, tokens=12, top_k=20, temperature=0.8, tokenizer=None)


def held_out() -> tuple[torch.Tensor, torch.Tensor]:
    """Return (SEQUENCES, BLOCK) tokens and targets; some targets are ignored (-100)."""
    tokens = torch.randint(0, 257, (SEQUENCES, BLOCK + 1), generator=torch.Generator().manual_seed(5))
    targets = tokens[:, 1:].clone()
    targets[-1, 10:] = -100
    return tokens[:, :-1], targets


def plan(source: Path, layout: str, world_size: int) -> ModelPlan:
    parser = argparse.ArgumentParser()
    add_arguments(parser, batch=MICRO_BATCH)
    words = [str(source), "--ds-config", layout, "--precision", "fp32", "--device", "cpu"]
    return plan_model(parser.parse_args(words), world_size)


def batches(dist: Dist) -> list[tuple[Any, Any]]:
    """Return this data-parallel rank's share of the held-out sequences, with equally many batches on all ranks."""
    tokens, targets = (part.numpy() for part in held_out())
    mesh, shares = dist.mesh, []
    for start in range(0, SEQUENCES, MICRO_BATCH * mesh.dp_size):
        mine = slice(start + mesh.dp_rank * MICRO_BATCH, start + (mesh.dp_rank + 1) * MICRO_BATCH)
        part, aims = tokens[mine], targets[mine]
        shares.append((part, aims) if len(part) else (tokens[:MICRO_BATCH], targets[:MICRO_BATCH] * 0 - 100))
    return shares


def run(folder: Path, name: str, dist: Dist) -> dict[str, Any]:
    model, layout = name.split(":")
    planned = plan(folder / model, layout, dist.world_size)
    engine = open_model(planned, dist)
    mesh = dist.mesh
    with engine.evaluating():
        first = validation_loss(engine.loss_sum, batches(dist), device=engine.device, mesh=mesh)
        states = torch.get_rng_state()
        scored = score(engine.row_losses, read_items(folder / "items.jsonl"), get_tokenizer("bytes"), mesh=mesh,
                       block_size=BLOCK, items_at_once=5, device=engine.device)
        ids = sample(engine.next_logits, torch.tensor([PROMPT] * 2), generator=torch.Generator().manual_seed(1),
                     **SAMPLE)
        again = validation_loss(engine.loss_sum, batches(dist), device=engine.device, mesh=mesh)
    result = {"val": first, "again": first == again, "hellaswag": asdict(scored), "ids": ids.tolist(),
              "random state kept": torch.equal(states, torch.get_rng_state()), "training": engine.module.training,
              "texts": generate(planned, dist, get_tokenizer("bytes"), torch.tensor(PROMPT), GENERATE)}
    for _ in range(2):
        micro_batch = tuple(torch.from_numpy(part) for part in batches(dist)[0])
        engine.train_step(iter([micro_batch]), 1e-2, lambda phase: nullcontext())
    tokens = held_out()[0][:2]
    with engine.evaluating():
        result["logits"] = engine.next_logits(tokens)[:, :257].float().tolist()
    run_dir = RunDir(folder / name.replace(":", "-"))
    run_dir.path.mkdir(exist_ok=True)
    checkpoint.save(engine, dist, run_dir, checkpoint.Progress(
        step=2, consumed=4, sample_hash="", seed=1, data="", model=asdict(planned.model),
        tokenizer=to_entry(get_tokenizer("bytes"))))
    return {**result, "everywhere": agree(dist, result)}


def agree(dist: Dist, result: dict[str, Any]) -> bool:
    """Return True if every rank has the same result."""
    values: list[Any] = [None] * dist.world_size
    torch.distributed.all_gather_object(values, result)
    return all(value == values[0] for value in values)


def main() -> None:
    folder, runs, results = Path(sys.argv[1]), sys.argv[2:], {}
    with setup(device="cpu", run_dir=folder / "run") as dist:
        for name in runs:
            results[name] = run(folder, name, dist)
            if dist.is_main:
                print(name, results[name]["val"], flush=True)
                (folder / "results.json").write_text(json.dumps(results))
            gc.collect()


if __name__ == "__main__":
    main()
