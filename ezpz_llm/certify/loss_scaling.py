"""fp16's loss scale and skipped steps, held to their definition, with clipped and unclipped steps of each AdamW.

What moves the scale is arithmetic, and its effect on a step none at all: it is a power of 2, which gradients have
and no longer have when they are clipped. So the products here are fp32's, which every device has. A step whose
gradients overflow, are NaN or have a norm above the limit changes nothing, to the last bit.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch

from ezpz_llm import checkpoint
from ezpz_llm.certify import one_process, recipe
from ezpz_llm.certify.one_process import Observed, settings_of, state_of
from ezpz_llm.certify.plain_step import MicroBatch, State
from ezpz_llm.certify.reference import make_engine
from ezpz_llm.dist import Degrees, Dist, Mesh
from ezpz_llm.engine.base import Engine
from ezpz_llm.engine.precision import LossScale
from ezpz_llm.launch.ranks import RankInfo
from ezpz_llm.layout.ds_config_blocks import DynamicScale
from ezpz_llm.layout.resolve import Request, resolve
from ezpz_llm.model.config import ModelConfig, get_model_config
from ezpz_llm.model.loss import configure_head
from ezpz_llm.rundir import RunDir

LENGTH, BATCH, ACCUMULATION, CHUNK = 32, 4, 2, 24
CLIPS = (recipe.CLIP, 0.0)
SCALE, TOO_LARGE = 1024.0, 2.0 ** 90
VERDICTS, RESUMED, LEAST = 400, 201, 2.0 ** -400
"""Steps, the one before which a checkpoint is loaded, and a scale that so many overflows do not reach: a run ends
there."""


def complaints() -> Iterator[str]:
    """What is wrong with the loss scale, and with steps under it."""
    for settings in (DynamicScale(window=5, least=LEAST), DynamicScale(window=4, hysteresis=3, least=LEAST),
                     DynamicScale(window=4, hysteresis=2, consecutive=True, least=LEAST)):
        yield from _of_the_rule(settings)
    with alone_on_cpu() as me:
        for optimizer in ("adamw", "adamw_unfused"):
            for clip in CLIPS:
                yield from _of_steps(optimizer, clip, me)


@contextmanager
def alone_on_cpu() -> Iterator[Dist]:
    """A process by itself, with a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        me = Dist(RankInfo(0, 1, 0, 1, 0, "certify"), torch.device("cpu"), None, Mesh(Degrees(1), 0),
                  RunDir(Path(folder)))
        yield me
        me.close()


def _of_the_rule(settings: DynamicScale) -> Iterator[str]:
    finite = np.random.default_rng(settings.hysteresis).random(VERDICTS) < 0.8
    scale = LossScale(settings)
    for number, (verdict, expected) in enumerate(zip(finite, scales(finite.tolist(), settings), strict=True)):
        if number == RESUMED:
            state, scale = scale.state_dict(), LossScale(settings)
            scale.load_state_dict(state)
        scale.update(bool(verdict))
        if scale.scale != expected:
            yield (f"after {number + 1} steps of {settings} the scale is {scale.scale:g}, not {expected:g}: "
                   f"{''.join('.' if one else 'X' for one in finite[:number + 1])} (X: overflow)")
            return


def scales(finite: Iterable[bool], settings: DynamicScale) -> list[float]:
    """The scale after each step, by the rule of DeepSpeed's DynamicLossScaler."""
    scale, overflow, tolerated, found = settings.start, -1, settings.hysteresis, []
    for number, verdict in enumerate(finite):
        calm = number - overflow - 1
        if not verdict:
            overflow = number
            if tolerated == 1:
                scale = max(scale / 2, settings.least)
            else:
                tolerated -= 1
        else:
            rises = calm > 0 and calm % settings.window == 0
            scale *= 2 if rises else 1
            if rises or settings.consecutive:
                tolerated = settings.hysteresis
        found.append(scale)
    return found


def small_config(dropout: float = 0.0) -> ModelConfig:
    """A model of one layer, for what does not depend on its size."""
    return get_model_config("tiny-gpt2", n_layer=1, n_head=2, n_kv_head=2, n_embd=32, block_size=LENGTH,
                            vocab_size=recipe.ODD_VOCABULARY, vocab_multiple=32, dropout=dropout)


def micro_batches(seed: int) -> list[MicroBatch]:
    """Tokens and targets of a step, some of these ignored."""
    tokens = np.random.default_rng(seed).integers(recipe.ODD_VOCABULARY, size=(BATCH, LENGTH + 1))
    targets = tokens[:, 1:].copy()
    targets[::3, :5] = -100
    return [(torch.from_numpy(part.copy()), torch.from_numpy(aims.copy()))
            for part, aims in zip(np.split(tokens[:, :-1], ACCUMULATION), np.split(targets, ACCUMULATION),
                                  strict=True)]


def _of_steps(optimizer: str, clip: float, me: Dist) -> Iterator[str]:
    config = small_config()
    resolved = resolve(Request("ddp", world_size=1, global_batch=BATCH, accumulation=ACCUMULATION, clip=clip,
                               precision="fp32", device=me.device.type, optimizer=optimizer))
    engine = make_engine(config, resolved, me)
    yield from _of_a_resume(engine, make_engine(config, resolved, me), me)
    configure_head(engine.module, CHUNK, recipe.Z_LOSS)
    title = f"{optimizer}, {f'clipped to {clip:g}' if clip else 'not clipped'}"

    def step(number: int, scale: float | None) -> tuple[State, float, float]:
        """The state before a step, and what the engine says of it."""
        engine._scale = None if scale is None else LossScale(DynamicScale(start=scale))
        before = state_of(engine)
        loss, norm = engine.train_step(micro_batches(number), recipe.PEAK_LR, lambda phase: nullcontext())
        return before, loss.item(), norm.item()

    made = []
    for number, scale in enumerate((SCALE, None)):
        before, loss, norm = step(number, scale)
        made.append(Observed(f"{title}, a step {'without' if scale is None else 'under'} a loss scale", before,
                             state_of(engine), micro_batches(number), recipe.PEAK_LR,
                             settings_of(config, clip, recipe.Z_LOSS), loss, norm))
    if (why := one_process.complaint(one_process.judge(made, "fp32")[0])) is not None:
        yield why
    yield from _of_skipped_steps(engine, title, step(2, TOO_LARGE))
    hook = engine.module.transformer["ln_f"].weight.register_hook(lambda gradient: gradient * math.nan)
    before, _, norm = step(3, None)
    hook.remove()
    if math.isfinite(norm) or not _same(before, state_of(engine)):
        yield f"{title}: a step of a gradient that is NaN, whose norm is told as {norm:g}, changed the state"
    engine.step_skip.limit = 1e-9
    before, _, norm = step(4, None)
    engine.step_skip.limit = math.inf
    if not _same(before, state_of(engine)):
        yield f"{title}: a step whose norm, {norm:g}, is above the limit of 1e-9 changed the state"
    before, *_ = step(5, None)
    if _same(before, state_of(engine)) or state_of(engine).step != before.step + 1:
        yield f"{title}: a right step after those that were skipped was not made"


def _of_a_resume(engine: Engine, fresh: Engine, me: Dist) -> Iterator[str]:
    """The scale and the steps that it has been good for are in a checkpoint."""
    engine._scale, fresh._scale = (LossScale(DynamicScale(start=start)) for start in (SCALE, 2 * SCALE))
    for _ in range(3):
        engine._scale.update(True)
    checkpoint.save(engine, me, me.run_dir, {"step": 1})
    checkpoint.load(checkpoint.find(me.run_dir.path), fresh, me)
    found, due = fresh._scale.state_dict(), engine._scale.state_dict()
    if found != due:
        yield f"after a resume the loss scale is {found}, not {due}"


def _of_skipped_steps(engine: Engine, title: str, told: tuple[State, float, float]) -> Iterator[str]:
    before, _, norm = told
    scale = engine._scale
    if norm != math.inf or not _same(before, state_of(engine)):
        yield f"{title}: a step that overflowed, whose norm is told as {norm:g}, changed the state"
    if engine.skipped_steps != 1 or scale is None or scale.scale != TOO_LARGE / 2:
        yield (f"{title}: after one overflow under a scale of {TOO_LARGE:g} the scale is "
               f"{scale.scale if scale else None}, and {engine.skipped_steps} steps are counted")


def _same(one: State, other: State) -> bool:
    return one.step == other.step and all(
        torch.equal(mine, theirs[name]) for kind, theirs in
        ((one.weights, other.weights), (one.first, other.first), (one.second, other.second))
        for name, mine in kind.items())
