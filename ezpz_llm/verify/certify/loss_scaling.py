"""Checks of the fp16 loss scale and of skipped steps, for clipped and unclipped steps of each AdamW implementation.

The scale is a power of 2 that is divided out before clipping, so it has no effect on a step. The checks therefore
run with fp32 matmuls, which every device supports. A step whose gradients overflow, are NaN, or have a norm above
the limit must leave the state bitwise unchanged.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training import checkpoint
from ezpz_llm.training.dist import Degrees, Dist, Mesh
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.precision import LossScale
from ezpz_llm.training.layout.ds_config_blocks import DynamicScale
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import ModelConfig, get_model_config
from ezpz_llm.training.model.loss import configure_head
from ezpz_llm.verify.certify import one_process, recipe
from ezpz_llm.verify.certify.one_process import ObservedStep, settings_of, state_of
from ezpz_llm.verify.certify.plain_step import MicroBatch, State
from ezpz_llm.verify.certify.reference import make_engine

LENGTH, BATCH, ACCUMULATION, CHUNK = 32, 4, 2, 24
_CLIPS = (recipe.CLIP, 0.0)
SCALE, TOO_LARGE = 1024.0, 2.0 ** 90
STEPS, _RESUMED_STEP, _MIN_SCALE = 400, 201, 2.0 ** -400
"""Number of scale updates, the first update before which the scale's state is reloaded, and a minimum scale too low
to be reached (a run ends at the minimum)."""


def find_problems() -> Iterator[str]:
    """Yield a message for each failed check of the loss scale and of steps under it."""
    for settings in (DynamicScale(window=5, least=_MIN_SCALE),
                     DynamicScale(window=4, hysteresis=3, least=_MIN_SCALE),
                     DynamicScale(window=4, hysteresis=2, consecutive=True, least=_MIN_SCALE)):
        yield from _check_scale_updates(settings)
    with single_cpu_rank() as single:
        for optimizer in ("adamw", "adamw_unfused"):
            for clip in _CLIPS:
                yield from _check_steps(optimizer, clip, single)


@contextmanager
def single_cpu_rank() -> Iterator[Dist]:
    """Yield the Dist of a single CPU rank, with a temporary run directory."""
    with tempfile.TemporaryDirectory() as folder:
        single = Dist(RankInfo(0, 1, 0, 1, 0, "certify"), torch.device("cpu"), None, Mesh(Degrees(1), 0),
                      RunDir(Path(folder)))
        yield single
        single.close()


def _check_scale_updates(settings: DynamicScale) -> Iterator[str]:
    finite = np.random.default_rng(settings.hysteresis).random(STEPS) < 0.8
    scale = LossScale(settings)
    expected_history = _expected_scales(finite.tolist(), settings)
    for number, (verdict, expected) in enumerate(zip(finite, expected_history, strict=True)):
        if number >= _RESUMED_STEP:
            state, scale = scale.state(), LossScale(settings)
            scale.restore(state)
        scale.update(bool(verdict))
        if scale.scale != expected:
            yield (f"after {number + 1} steps of {settings} the scale is {scale.scale:g}, not {expected:g}: "
                   f"{''.join('.' if each else 'X' for each in finite[:number + 1])} (X: overflow)")
            return


def _expected_scales(finite: Iterable[bool], settings: DynamicScale) -> list[float]:
    """Return the scale after each step, by the rule of DeepSpeed's DynamicLossScaler."""
    scale, overflow, tolerated, history = settings.start, -1, settings.hysteresis, []
    for number, verdict in enumerate(finite):
        since_overflow = number - overflow - 1
        if not verdict:
            overflow = number
            if tolerated == 1:
                scale = max(scale / 2, settings.least)
            else:
                tolerated -= 1
        else:
            rises = since_overflow > 0 and since_overflow % settings.window == 0
            scale *= 2 if rises else 1
            if rises or settings.consecutive:
                tolerated = settings.hysteresis
        history.append(scale)
    return history


def small_config(dropout: float = 0.0) -> ModelConfig:
    """Return the config of a one-layer model, for checks that do not depend on the size."""
    return get_model_config("tiny-gpt2", n_layer=1, n_head=2, n_kv_head=2, n_embd=32, block_size=LENGTH,
                            vocab_size=recipe.ODD_VOCABULARY, vocab_multiple=32, dropout=dropout)


def micro_batches(seed: int) -> list[MicroBatch]:
    """Return tokens and targets of a step, with some targets ignored."""
    tokens = np.random.default_rng(seed).integers(recipe.ODD_VOCABULARY, size=(BATCH, LENGTH + 1))
    targets = tokens[:, 1:].copy()
    targets[::3, :5] = -100
    return [(torch.from_numpy(part.copy()), torch.from_numpy(part_targets.copy()))
            for part, part_targets in zip(np.split(tokens[:, :-1], ACCUMULATION), np.split(targets, ACCUMULATION),
                                          strict=True)]


def _check_steps(optimizer: str, clip: float, single: Dist) -> Iterator[str]:
    config = small_config()
    resolved = resolve(Request("ddp", world_size=1, global_batch=BATCH, accumulation=ACCUMULATION, clip=clip,
                               precision="fp32", device=single.device.type, optimizer=optimizer))
    engine = make_engine(config, resolved, single)
    yield from _check_resume(engine, make_engine(config, resolved, single), single)
    configure_head(engine.module, CHUNK, recipe.Z_LOSS)
    title = f"{optimizer}, {f'clipped to {clip:g}' if clip else 'not clipped'}"

    def step(number: int, scale: float | None) -> tuple[State, float, float]:
        """Take a step; return the state before it, and the step's loss and gradient norm."""
        engine._scale = None if scale is None else LossScale(DynamicScale(start=scale))
        before = state_of(engine)
        loss, norm = engine.train_step(micro_batches(number), recipe.PEAK_LR, lambda phase: nullcontext())
        return before, loss.item(), norm.item()

    observed = []
    for number, scale in enumerate((SCALE, None)):
        before, loss, norm = step(number, scale)
        name = f"{title}, a step {'without' if scale is None else 'under'} a loss scale"
        observed.append(ObservedStep(name, before,
                                     state_of(engine), micro_batches(number), recipe.PEAK_LR,
                                     settings_of(config, clip, recipe.Z_LOSS), loss, norm))
    if (problem := one_process.describe_failures(one_process.compare_steps(observed, "fp32")[0])) is not None:
        yield problem
    yield from _check_skipped_steps(engine, title, step(2, TOO_LARGE))
    hook = engine.module.transformer["ln_f"].weight.register_hook(lambda gradient: gradient * math.nan)
    before, _, norm = step(3, None)
    hook.remove()
    if math.isfinite(norm):
        yield f"{title}: a step with NaN gradients has the finite gradient norm {norm:g}"
    if not _equal_states(before, state_of(engine)):
        yield f"{title}: a step with NaN gradients changed the state"
    engine.step_skip.limit = 1e-9
    before, _, norm = step(4, None)
    engine.step_skip.limit = math.inf
    if not _equal_states(before, state_of(engine)):
        yield f"{title}: a step with gradient norm {norm:g}, above the limit of 1e-9, changed the state"
    before, *_ = step(5, None)
    if _equal_states(before, state_of(engine)) or state_of(engine).step != before.step + 1:
        yield f"{title}: a valid step after skipped steps was skipped too"


def _check_resume(engine: Engine, fresh: Engine, single: Dist) -> Iterator[str]:
    """Check that a checkpoint restores the scale and the number of steps since the last overflow."""
    engine._scale, fresh._scale = (LossScale(DynamicScale(start=start)) for start in (SCALE, 2 * SCALE))
    for _ in range(3):
        engine._scale.update(True)
    checkpoint.save(engine, single, single.run_dir, checkpoint.Progress(step=1))
    checkpoint.load(checkpoint.find(single.run_dir.path), fresh, single)
    loaded, saved = fresh._scale.state(), engine._scale.state()
    if loaded != saved:
        yield f"after a resume the loss scale is {loaded}, not {saved}"


def _check_skipped_steps(engine: Engine, title: str, step: tuple[State, float, float]) -> Iterator[str]:
    before, _, norm = step
    scale = engine._scale
    if norm != math.inf:
        yield f"{title}: a step with overflow has gradient norm {norm:g}, not inf"
    if not _equal_states(before, state_of(engine)):
        yield f"{title}: a step with overflow changed the state"
    if engine.skipped_steps != 1 or scale is None or scale.scale != TOO_LARGE / 2:
        yield (f"{title}: after one overflow under a scale of {TOO_LARGE:g} the scale is "
               f"{scale.scale if scale else None}, and {engine.skipped_steps} steps are counted as skipped")



def _equal_states(first: State, second: State) -> bool:
    return first.step == second.step and all(
        torch.equal(tensor, tensors[name]) for kind, tensors in
        ((first.weights, second.weights), (first.first, second.first), (first.second, second.second))
        for name, tensor in kind.items())
