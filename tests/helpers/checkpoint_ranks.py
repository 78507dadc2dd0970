"""Programs that the checkpoint tests run on one or two ranks.

Usage: python checkpoint_ranks.py PROGRAM FOLDER. Rank 0 writes the result of a program to FOLDER/PROGRAM.json.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as torch_dist

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.base.records import as_plain
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training import checkpoint
from ezpz_llm.training.checkpoint.manifest import complete_checkpoints
from ezpz_llm.training.dist.setup import Dist, setup
from ezpz_llm.training.engine.base import MicroStepEngine
from ezpz_llm.training.engine.build import build_engine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import decay_groups, init_weights

LAYOUTS = ("ddp", "zero0", "zero1", "zero2", "zero3")
PAIRS = (("ddp", "zero3"), ("zero3", "ddp"), ("zero1", "zero3"), ("zero3", "zero2"), ("zero2", "zero0"),
         ("zero0", "zero1"))
VOCABULARY, BLOCK, GLOBAL_BATCH = 61, 16, 8


def build(layout: str, dist: Dist, *, seed: int, dropout: float = 0.0, width: int = 24) -> MicroStepEngine:
    """Build a small GPT with tied embeddings, whose sizes are not divisible by the number of ranks."""
    config = get_model_config("tiny-gpt2", n_layer=2, n_head=3, n_embd=width, block_size=BLOCK,
                              vocab_size=VOCABULARY, dropout=dropout)
    model = GPT(config)
    init_weights(model, model.config, seed)
    resolved = resolve(Request(layout, world_size=dist.world_size, global_batch=GLOBAL_BATCH, micro_batch=2,
                               precision="fp32", clip=1.0))
    engine = build_engine(model, resolved, dist, lr=1e-2, betas=(0.9, 0.95), eps=1e-8,
                          param_groups=decay_groups(model, 0.1))
    assert isinstance(engine, MicroStepEngine)
    return engine


def train(engine: MicroStepEngine, dist: Dist, first: int, last: int) -> list[float]:
    """Return the losses of steps [first, last), over the same samples for any number of ranks."""
    losses = []
    for step in range(first, last):
        tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, BLOCK), generator=torch.Generator().manual_seed(step))
        targets = (3 * tokens + 1) % VOCABULARY
        share = GLOBAL_BATCH // dist.world_size
        rows = range(dist.rank * share, (dist.rank + 1) * share, engine.batch.micro_batch)
        total = torch.zeros(())
        for start in rows:
            mine = slice(start, start + engine.batch.micro_batch)
            loss = engine.module(tokens[mine], targets[mine])
            engine.backward(loss, is_last=start == rows[-1])
            total += loss.detach() / len(rows)
        engine.step(1e-2 / (1 + step / 10))
        if dist.world_size > 1:
            torch_dist.all_reduce(total)
        losses.append(total.item() / dist.world_size)
    return losses


def run_dir_of(folder: Path, layout: str, dist: Dist) -> RunDir:
    return RunDir(folder / f"{Path(layout).stem}-on-{dist.world_size}")


def state_after(step: int) -> checkpoint.Progress:
    return checkpoint.Progress(step=step, consumed=step * GLOBAL_BATCH, sample_hash="ab" * 32)


def same_layout(folder: Path, dist: Dist) -> dict[str, object]:
    """Train 20 steps and save after 10; then load into a new engine and repeat the last 10."""
    result: dict[str, object] = {}
    for layout in (*LAYOUTS, *sys.argv[3:]):  # further layouts may be given by name or path
        torch.manual_seed(100 + dist.rank)
        engine = build(layout, dist, seed=1, dropout=0.1)
        straight = train(engine, dist, 0, 10)
        saved = checkpoint.save(engine, dist, run_dir_of(folder, layout, dist), state_after(10))
        straight += train(engine, dist, 10, 20)
        torch.manual_seed(dist.rank)
        engine = build(layout, dist, seed=2, dropout=0.1)
        train(engine, dist, 0, 1)  # loading must also overwrite state that has been stepped
        loaded = checkpoint.load(checkpoint.find(saved), engine, dist)
        state = {**as_plain(loaded.state), "rng_restored": loaded.rng_restored}
        resumed = straight[:10] + train(engine, dist, 10, 20)
        result[Path(layout).stem] = {"straight": straight, "resumed": resumed, "state": state}
    return result


def cross_layout(folder: Path, dist: Dist) -> dict[str, object]:
    """Load one layout's checkpoint in another, without dropout, since its masks depend on the layout's RNG use."""
    expected = {}
    for layout in LAYOUTS:
        engine = build(layout, dist, seed=1)
        train(engine, dist, 0, 10)
        checkpoint.save(engine, dist, run_dir_of(folder, f"plain-{layout}", dist), state_after(10))
        expected[layout] = train(engine, dist, 10, 15)
    pairs = {}
    for saved, loaded in PAIRS:
        engine = build(loaded, dist, seed=2)
        checkpoint.load(checkpoint.find(run_dir_of(folder, f"plain-{saved}", dist).path), engine, dist)
        pairs[f"{saved} -> {loaded}"] = [expected[saved], train(engine, dist, 10, 15)]
    return {"pairs": pairs, "expected": expected}


def other_world(folder: Path, dist: Dist) -> dict[str, object]:
    """Load checkpoints that two ranks saved on this number of ranks."""
    results = {}
    for saved, loaded in (("zero3", "ddp"), ("zero1", "zero3"), ("zero2", "zero2")):
        engine = build(loaded, dist, seed=2)
        restored = checkpoint.load(checkpoint.find(folder / f"plain-{saved}-on-2"), engine, dist).rng_restored
        results[saved] = {"losses": train(engine, dist, 10, 15), "rng_restored": restored}
    return results


def train_alone(folder: Path, dist: Dist) -> dict[str, object]:
    """Save on this number of ranks, then continue training."""
    engine = build("ddp", dist, seed=1)
    train(engine, dist, 0, 10)
    checkpoint.save(engine, dist, run_dir_of(folder, "alone", dist), state_after(10))
    return {"losses": train(engine, dist, 10, 15)}


def new_process(folder: Path, dist: Dist) -> dict[str, object]:
    """Resume checkpoints of `same_layout` and `train_alone` in new processes."""
    engine = build("zero2", dist, seed=2, dropout=0.1)
    checkpoint.load(checkpoint.find(run_dir_of(folder, "zero2", dist).path), engine, dist)
    resumed = train(engine, dist, 10, 20)
    engine = build("zero3", dist, seed=2)
    checkpoint.load(checkpoint.find(folder / "alone-on-1"), engine, dist)
    return {"zero2": resumed, "alone in zero3": train(engine, dist, 10, 15)}


@contextmanager
def small_files_only(limit: int) -> Iterator[None]:
    """Make writes beyond `limit` bytes of a file fail with an OSError, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def error_of(dist: Dist, action: object) -> list[str]:
    """Return every rank's message of the UserError that `action` raises."""
    message = "no error"
    try:
        action()
    except UserError as error:
        message = str(error)
    messages = [None] * dist.world_size
    torch_dist.all_gather_object(messages, message)
    return messages


def failures(folder: Path, dist: Dist) -> dict[str, object]:
    """Provoke errors: a disk that is full for one rank, changed files, and a checkpoint of another model."""
    run_dir = run_dir_of(folder, "failures", dist)
    engine = build("zero1", dist, seed=1)
    train(engine, dist, 0, 1)
    checkpoint.save(engine, dist, run_dir, state_after(1))
    result: dict[str, object] = {}
    for rank in (0, 1):
        with small_files_only(5000 if dist.rank == rank else resource.RLIM_INFINITY):
            result[f"full disk on rank {rank}"] = error_of(
                dist, lambda: checkpoint.save(engine, dist, run_dir, state_after(2)))
    result["left after a full disk"] = sorted(os.listdir(run_dir.checkpoints))
    # Training continues after the failed save, and the earlier checkpoint can still be loaded.
    saved = checkpoint.find(run_dir.path)
    train(engine, dist, 1, 2)
    checkpoint.load(saved, engine, dist)
    result["another model"] = error_of(dist, lambda: checkpoint.load(saved, build("zero1", dist, seed=1, width=48),
                                                                     dist))
    before = train(engine, dist, 1, 2)
    checkpoint.load(saved, engine, dist)
    if dist.is_main:
        shard = saved / "rank-00001.safetensors"
        data = bytearray(shard.read_bytes())
        data[-100] ^= 1
        shard.write_bytes(data)
    dist.barrier()
    result["flipped byte"] = error_of(dist, lambda: checkpoint.load(saved, engine, dist))
    result["unchanged by failed loads"] = before == train(engine, dist, 1, 2)
    dist.barrier()
    if dist.is_main:
        (saved / "index.json").unlink()
    dist.barrier()
    result["missing file"] = error_of(dist, lambda: checkpoint.load(saved, engine, dist))
    return result


def settle_together(saver: checkpoint.Saver, dist: Dist) -> checkpoint.Saved | None:
    """Wait as the training loop does: advance until no rank's saver is busy."""
    while True:
        busy = torch.tensor(float(saver.is_busy))
        torch_dist.all_reduce(busy, op=torch_dist.ReduceOp.MAX)
        if not busy and (saved := saver.advance()):
            return saved


def background(folder: Path, dist: Dist) -> dict[str, object]:
    """Continue training while checkpoints are written; then resume from each of them."""
    result: dict[str, object] = {}
    for layout in LAYOUTS:
        run_dir = run_dir_of(folder, f"background-{layout}", dist)
        saver = checkpoint.Saver(dist, run_dir, checkpoint.Keep(1, every=2), in_background=True)
        engine = build(layout, dist, seed=1, dropout=0.1, width=96)
        losses, folders, busy = train(engine, dist, 0, 2), [], []
        for step in (2, 3, 4):
            assert saver.start(engine, state_after(step)) is None
            busy.append(saver.is_busy)
            losses += train(engine, dist, step, step + 1)
            if step != 3:  # the save of step 3 is left to the next start, which waits for it
                folders.append(settle_together(saver, dist).folder.name)
        for step in (2, 4):
            checkpoint.load(run_dir.checkpoints / f"step-0000000{step}", engine, dist)
            resumed = train(engine, dist, step, 5)
            result[f"{layout} from {step}"] = [resumed, losses[step:]]
        result[layout] = {"busy": busy, "folders": folders, "left": sorted(os.listdir(run_dir.checkpoints)),
                          "saved twice": saver.advance() is None and saver.finish() is None}
    return result


def background_failure(folder: Path, dist: Dist) -> dict[str, object]:
    """Fill the disk for one rank during a background save; check that the next checkpoint is written."""
    run_dir = run_dir_of(folder, "background-failure", dist)
    saver = checkpoint.Saver(dist, run_dir, None, in_background=True)
    engine = build("zero1", dist, seed=1)
    checkpoint.save(engine, dist, run_dir, state_after(0))
    result: dict[str, object] = {}
    for rank in (0, 1):
        with small_files_only(5000 if dist.rank == rank else resource.RLIM_INFINITY):
            saver.start(engine, state_after(1))
            train(engine, dist, 0, 1)
            result[f"full disk on rank {rank}"] = error_of(dist, lambda: settle_together(saver, dist))
    dist.barrier()
    result["left"] = sorted(os.listdir(run_dir.checkpoints))
    saver.start(engine, state_after(1))
    result["then"] = saver.finish().folder.name
    return result


def damage(path: Path, dist: Dist) -> None:
    """Flip a bit in the middle of a file."""
    dist.barrier()
    if dist.is_main:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 16
        path.write_bytes(data)
    dist.barrier()


def fall_back(folder: Path, dist: Dist) -> dict[str, object]:
    """Load from a run whose newest checkpoints are damaged in a file that only one rank verifies."""
    run_dir = run_dir_of(folder, "damaged", dist)
    engine = build("zero1", dist, seed=1)
    for step in (1, 2, 3):
        train(engine, dist, step - 1, step)
        checkpoint.save(engine, dist, run_dir, state_after(step))
    expected = train(engine, dist, 3, 5)
    result: dict[str, object] = {}
    for name, victim in (("newest", "step-00000003/rank-00001.safetensors"),
                         ("two", "step-00000002/state.json"), ("all", "step-00000001/index.json")):
        accepted: list[str] = []
        loaded = None

        def go_back(accepted: list[str] = accepted) -> None:
            nonlocal loaded
            loaded = checkpoint.load_newest(run_dir.path, engine, dist,
                                            lambda place, state, *_: accepted.append(f"{place.name} {state.step}"))

        damage(run_dir.checkpoints / victim, dist)
        result[name] = {"error": error_of(dist, go_back), "accepted": accepted}
        if loaded is not None:
            result[name] |= {"folder": loaded.folder.name, "state": loaded.state.step,
                             "passed over": [str(damage) for damage in loaded.skipped],
                             "losses": train(engine, dist, loaded.state.step, 5)}
    return {**result, "expected": expected}


def save_for_ever(folder: Path, dist: Dist) -> dict[str, object]:
    """Save step after step until killed, continuing from the last step of an earlier call."""
    engine = build("ddp", dist, seed=1, width=384)  # 43 MB of state: a save takes long enough to be hit
    run_dir = RunDir(folder)
    folders = complete_checkpoints(run_dir.checkpoints)
    step = int(folders[-1].name.removeprefix("step-")) if folders else 0
    while True:
        step += 1
        checkpoint.save(engine, dist, run_dir, state_after(step))
        checkpoint.prune(run_dir, checkpoint.Keep(2))


PROGRAMS = {program.__name__: program for program in (same_layout, cross_layout, other_world, train_alone,
                                                      new_process, failures, background, background_failure,
                                                      fall_back, save_for_ever)}


def main() -> None:
    folder = Path(sys.argv[2])
    dist = setup(device="cpu", run_dir=folder / "run")
    for name in sys.argv[1].split(","):
        result = PROGRAMS[name](folder, dist)
        if dist.is_main:
            (folder / f"{name}.json").write_text(json.dumps(result))
    dist.close()


if __name__ == "__main__":
    main()
