"""Comparison of one process with the step definition, on code paths that the layouts' recipe does not use.

Two short runs have sequences longer than a block of the attention kernel, a padded vocabulary, a different number
of ignored targets in each micro-batch, a resume before the last step, and an evaluation after it. The first run
clips gradients and computes the loss in chunks. The second does not clip, computes all logits at once, and has a
z-loss.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training import checkpoint
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.evaluate.validation import validation_loss
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import ModelConfig
from ezpz_llm.training.model.loss import configure_head
from ezpz_llm.verify.certify import one_process, recipe
from ezpz_llm.verify.certify.cases import Case
from ezpz_llm.verify.certify.injected_faults import Fault, find_fault
from ezpz_llm.verify.certify.one_process import DISAGREES, Evaluation, ObservedStep, settings_of, state_of
from ezpz_llm.verify.certify.plain_step import IGNORED, MicroBatch, cosine_rate
from ezpz_llm.verify.certify.records import CaseResult
from ezpz_llm.verify.certify.reference import make_engine, on_cpu, single_rank_world


@dataclass(frozen=True)
class _Run:
    title: str
    clip: float
    accumulation: int
    loss_chunk: int
    z_loss: float


_RUNS = (_Run("clipped", recipe.CLIP, 2, recipe.LOSS_CHUNK, 0.0),
         _Run("not clipped", recipe.WIDE_CLIP, 4, 0, recipe.Z_LOSS))


def check_paths(model: str, dtype: str, dist: Dist) -> None:
    """Check the steps of both runs against their definition. Call on one rank.

    Raises:
        UserError: names the phase, the step and the module.
    """
    comparisons, _ = one_process.compare_steps(observe(model, dtype, dist), dtype)
    one_process.raise_if_failed(comparisons, DISAGREES, f"{model} {dtype}")


def certify_shared_fault(case: Case, dist: Dist) -> CaseResult:
    """Compare a single process that has the case's fault with the step definition, and return the case's result."""
    began = time.perf_counter()
    fault = find_fault(case.fault) if case.fault else None
    comparisons, _ = one_process.compare_steps(observe(case.model, case.dtype, dist, fault), case.dtype)
    text = one_process.describe_failures(comparisons)
    return CaseResult(
        **asdict(case), passed=text is None, failures=[] if text is None else [f"{DISAGREES}: {text}"],
        kinds=[phase for phase in one_process.PHASES
               if any(each.phase == phase and each.finding.failed for each in comparisons)],
        worst={}, one_process=one_process.worst_by_phase(comparisons), seconds=time.perf_counter() - began)


def observe(model: str, dtype: str, dist: Dist, fault: Fault | None = None,
            seed: int = recipe.SEED) -> list[ObservedStep]:
    """Take the steps of both runs, optionally with a shared fault, and return them."""
    single = single_rank_world(dist)
    config = replace(recipe.model_config(model), block_size=recipe.LONG, vocab_size=recipe.ODD_VOCABULARY)
    return [step for run in _RUNS for step in _observe(run, config, dtype, single, fault, seed)]


def _observe(run: _Run, config: ModelConfig, dtype: str, single: Dist, fault: Fault | None,
             seed: int) -> list[ObservedStep]:
    resolved = resolve(Request("ddp", world_size=1, global_batch=recipe.LONG_BATCH, accumulation=run.accumulation,
                               clip=run.clip, precision=dtype, device=single.device.type))

    def new_engine() -> Engine:
        """Build an engine with this configuration and the fault, if there is one."""
        engine = make_engine(config, resolved, single, seed=seed)
        configure_head(engine.module, run.loss_chunk, run.z_loss)
        if fault is not None and fault.engine is not None:
            fault.engine(engine, single)
        return engine

    engine, steps = new_engine(), []
    settings = settings_of(config, run.clip, run.z_loss)
    for step in range(recipe.LONG_STEPS):
        saved = None
        if step == recipe.LONG_STEPS - 1:
            saved = state_of(engine)
            engine = _resume(engine, new_engine(), single, step)
        before = state_of(engine)
        rate = cosine_rate(step, recipe.PEAK_LR, recipe.FLOOR_LR, 0, recipe.LONG_STEPS)
        batches = list(_micro_batches(config, run.accumulation, seed, step, single.device))
        loss, norm = engine.train_step(batches, rate, lambda phase: nullcontext())
        steps.append(ObservedStep(f"step {step + 1} of long sequences, {run.title}", before, state_of(engine),
                                  on_cpu(batches), rate, settings, loss.item(), norm.item(), saved))
    steps[-1] = replace(steps[-1], evaluated=_evaluate(engine, config, run.accumulation, seed, single))
    return steps


def _evaluate(engine: Engine, config: ModelConfig, accumulation: int, seed: int, single: Dist) -> Evaluation:
    """Evaluate the engine on held-out batches, some of whose targets are ignored."""
    batches = on_cpu(_micro_batches(config, accumulation, seed, recipe.LONG_STEPS, single.device))
    with engine.evaluating():
        loss, _ = validation_loss(
            engine.loss_sum, [(tokens.numpy(), targets.numpy()) for tokens, targets in batches],
            device=single.device, mesh=single.mesh)
    return Evaluation(batches, loss)


def _resume(engine: Engine, fresh: Engine, single: Dist, step: int) -> Engine:
    """Save a checkpoint of `engine`, load it into `fresh`, and return `fresh`."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(engine, single, RunDir(Path(folder)), checkpoint.Progress(step=step))
        checkpoint.load(checkpoint.find(Path(folder)), fresh, single)
    return fresh


def _micro_batches(config: ModelConfig, accumulation: int, seed: int, step: int,
                   device: torch.device) -> list[MicroBatch]:
    rows = recipe.sequences(config, (seed - recipe.SEED) * recipe.HELD_OUT + step, recipe.LONG_BATCH)
    ignored = np.random.default_rng((seed, step)).random((len(rows), config.block_size))
    # From 0 in the first row to twice the mean share in the last.
    share = 2 * recipe.IGNORED_SHARE * np.arange(len(rows))[:, None] / (len(rows) - 1)
    targets = np.where(ignored < share, IGNORED, rows[:, 1:])
    return [(torch.from_numpy(tokens).contiguous().to(device), torch.from_numpy(part_targets).to(device))
            for tokens, part_targets in zip(np.split(rows[:, :-1], accumulation), np.split(targets, accumulation),
                                            strict=True)]
