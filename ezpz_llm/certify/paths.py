"""Paths of a step that the layouts' recipe leaves off, in one process that is held to the definition of the step.

Two short runs: sequences longer than a block of attention, a vocabulary that its table pads, targets that are
ignored, unevenly over the micro batches, a resume before the last step, and an evaluation after it. In the first,
clipping is active and the loss is in chunks; in the second, it is not, and the loss has all logits and a z-loss.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ezpz_llm import checkpoint
from ezpz_llm.certify import one_process, recipe
from ezpz_llm.certify.cases import Case
from ezpz_llm.certify.injected_faults import Fault, find_fault
from ezpz_llm.certify.one_process import DISAGREES, Evaluated, Observed, settings_of, state_of
from ezpz_llm.certify.plain_step import IGNORED, MicroBatch, cosine_rate
from ezpz_llm.certify.reference import alone, make_engine, on_cpu
from ezpz_llm.certify.sample_order import hold_reader_to_definition
from ezpz_llm.dist import Dist
from ezpz_llm.engine.base import Engine
from ezpz_llm.evaluate.validation import validation_loss
from ezpz_llm.layout.resolve import Request, resolve
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.loss import configure_head
from ezpz_llm.rundir import RunDir


@dataclass(frozen=True)
class _Run:
    title: str
    clip: float
    accumulation: int
    loss_chunk: int
    z_loss: float


_RUNS = (_Run("clipped", recipe.CLIP, 2, recipe.LOSS_CHUNK, 0.0),
         _Run("not clipped", recipe.WIDE_CLIP, 4, 0, recipe.Z_LOSS))


def hold_to_definition(model: str, dtype: str, dist: Dist) -> None:
    """Refuse to go on where one process, or what it reads, is not what the definition says. One rank calls it.

    Raises:
        UserError: names the phase, the step and the module.
    """
    hold_reader_to_definition()
    found, _ = one_process.judge(observe(model, dtype, dist), dtype)
    one_process.refuse(found, DISAGREES, f"{model} {dtype}")


def one_process_with(case: Case, dist: Dist) -> dict[str, Any]:
    """The result of a case whose fault all layouts share: one process with it, held to the definition."""
    began = time.perf_counter()
    fault = find_fault(case.fault) if case.fault else None
    found, _ = one_process.judge(observe(case.model, case.dtype, dist, fault), case.dtype)
    why = one_process.complaint(found)
    return {**asdict(case), "passed": why is None, "failures": [] if why is None else [f"{DISAGREES}: {why}"],
            "kinds": [phase for phase in one_process.PHASES
                      if any(one.phase == phase and one.finding.failed for one in found)],
            "worst": {}, "one_process": one_process.worst_by_phase(found),
            "seconds": time.perf_counter() - began}


def observe(model: str, dtype: str, dist: Dist, fault: Fault | None = None,
            seed: int = recipe.SEED) -> list[Observed]:
    """The steps of both runs, perhaps with a shared fault."""
    me = alone(dist)
    config = replace(recipe.model_config(model), block_size=recipe.LONG, vocab_size=recipe.ODD_VOCABULARY)
    return [step for run in _RUNS for step in _observe(run, config, dtype, me, fault, seed)]


def _observe(run: _Run, config: ModelConfig, dtype: str, me: Dist, fault: Fault | None,
             seed: int) -> list[Observed]:
    resolved = resolve(Request("ddp", world_size=1, global_batch=recipe.LONG_BATCH, accumulation=run.accumulation,
                               clip=run.clip, precision=dtype, device=me.device.type))

    def begun() -> Engine:
        """A fresh engine of this configuration, with the fault in it, if one is injected."""
        engine = make_engine(config, resolved, me, seed=seed)
        configure_head(engine.module, run.loss_chunk, run.z_loss)
        if fault is not None and fault.engine is not None:
            fault.engine(engine, me)
        return engine

    engine, found = begun(), []
    settings = settings_of(config, run.clip, run.z_loss)
    for step in range(recipe.LONG_STEPS):
        saved = None
        if step == recipe.LONG_STEPS - 1:
            saved = state_of(engine)
            engine = _resumed(engine, begun(), me, step)
        before = state_of(engine)
        rate = cosine_rate(step, recipe.PEAK_LR, recipe.FLOOR_LR, 0, recipe.LONG_STEPS)
        batches = list(_micro_batches(config, run.accumulation, seed, step, me.device))
        loss, norm = engine.train_step(batches, rate, lambda phase: nullcontext())
        found.append(Observed(f"step {step + 1} of long sequences, {run.title}", before, state_of(engine),
                              on_cpu(batches), rate, settings, loss.item(), norm.item(), saved))
    found[-1] = replace(found[-1], evaluated=_evaluated(engine, config, run.accumulation, seed, me))
    return found


def _evaluated(engine: Engine, config: ModelConfig, accumulation: int, seed: int, me: Dist) -> Evaluated:
    """The engine's loss of batches that it was not trained on, targets ignored in them too."""
    batches = on_cpu(_micro_batches(config, accumulation, seed, recipe.LONG_STEPS, me.device))
    with engine.evaluating():
        loss, _ = validation_loss(
            engine.loss_sum, [(tokens.numpy(), targets.numpy()) for tokens, targets in batches], device=me.device,
            mesh=me.mesh)
    return Evaluated(batches, loss)


def _resumed(engine: Engine, fresh: Engine, me: Dist, step: int) -> Engine:
    """The state of one engine in another, by way of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(engine, me, RunDir(Path(folder)), {"step": step})
        checkpoint.load(checkpoint.find(Path(folder)), fresh, me)
    return fresh


def _micro_batches(config: ModelConfig, accumulation: int, seed: int, step: int,
                   device: torch.device) -> list[MicroBatch]:
    rows = recipe.sequences(config, (seed - recipe.SEED) * recipe.HELD_OUT + step)[:recipe.LONG_BATCH]
    ignored = np.random.default_rng((seed, step)).random((len(rows), config.block_size))
    # Up to twice the share in the last row, and none in the first.
    share = 2 * recipe.IGNORED_SHARE * np.arange(len(rows))[:, None] / (len(rows) - 1)
    targets = np.where(ignored < share, IGNORED, rows[:, 1:])
    return [(torch.from_numpy(tokens).contiguous().to(device), torch.from_numpy(aims).to(device))
            for tokens, aims in zip(np.split(rows[:, :-1], accumulation), np.split(targets, accumulation),
                                    strict=True)]
