"""The fp16 loss scale and skipped steps, for clipped and unclipped steps of each AdamW implementation.

The scale is a power of 2 that is divided out before clipping, so it has no effect on a step. Therefore the tests
run with fp32 matmuls, which a CPU supports.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from one_layer import micro_batches, one_layer, one_layer_engine, single_rank

from ezpz_llm.training import checkpoint
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.engine.base import MicroStepEngine
from ezpz_llm.training.engine.precision import LossScale
from ezpz_llm.training.layout.ds_config_blocks import DynamicScale
from ezpz_llm.training.model.loss import configure_head
from ezpz_llm.verify.certify import one_process, recipe
from ezpz_llm.verify.certify.one_process import ObservedStep, settings_of, state_of
from ezpz_llm.verify.certify.plain_step import State

SCALE, TOO_LARGE = 1024.0, 2.0 ** 90
CHUNK, RATE = 24, 2e-3


@pytest.fixture
def dist(tmp_path: Path) -> Dist:
    return single_rank(tmp_path)


@pytest.fixture(params=[("adamw", 0.1), ("adamw", 0.0), ("adamw_unfused", 0.1), ("adamw_unfused", 0.0)],
                ids=lambda param: f"{param[0]}-{'clipped' if param[1] else 'not clipped'}")
def engine(request: pytest.FixtureRequest, dist: Dist) -> MicroStepEngine:
    optimizer, clip = request.param
    engine = one_layer_engine(dist, clip=clip, optimizer=optimizer)
    configure_head(engine.module, CHUNK, recipe.Z_LOSS)
    return engine


def take_step(engine: MicroStepEngine, number: int, scale: float | None = None) -> tuple[float, float]:
    """Take a step under a loss scale, and return its loss and gradient norm."""
    engine.loss_scale = None if scale is None else LossScale(DynamicScale(start=scale))
    loss, norm = engine.train_step(micro_batches(number), RATE, lambda phase: nullcontext())
    return loss.item(), norm.item()


def assert_equal_states(first: State, second: State) -> None:
    assert first.step == second.step
    for tensors, others in ((first.weights, second.weights), (first.first, second.first),
                            (first.second, second.second)):
        assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())


def assert_valid_step(engine: MicroStepEngine, number: int, scale: float | None = None) -> None:
    """Take a step, and compare it with the step definition."""
    before = state_of(engine)
    loss, norm = take_step(engine, number, scale)
    step = ObservedStep(f"step {number}", before, state_of(engine), micro_batches(number), RATE,
                        settings_of(one_layer(), engine.clip, recipe.Z_LOSS), loss, norm)
    assert one_process.describe_failures(one_process.compare_steps([step], "fp32")[0]) is None


@pytest.mark.parametrize("settings", [
    DynamicScale(window=5, least=2.0 ** -400), DynamicScale(window=4, hysteresis=3, least=2.0 ** -400),
    DynamicScale(window=4, hysteresis=2, consecutive=True, least=2.0 ** -400)], ids=str)
def test_the_scale_follows_deepspeeds_even_if_resumed(settings: DynamicScale,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.fp16 import loss_scaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)  # rank 0 logs each overflow
    expected = loss_scaler.DynamicLossScaler(settings.start, settings.window, settings.least, settings.hysteresis,
                                             settings.consecutive)
    scale = LossScale(settings)
    finite = np.random.default_rng(settings.hysteresis).random(400) < 0.8
    for step, is_finite in enumerate(finite):
        if step >= 200:
            state, scale = scale.state(), LossScale(settings)
            scale.restore(state)
        scale.update(bool(is_finite))
        expected.update_scale(not is_finite)
        assert scale.scale == expected.cur_scale, step


def test_a_checkpoint_restores_the_scale_and_the_steps_since_an_overflow(dist: Dist) -> None:
    saved, loaded = (one_layer_engine(dist, clip=0.1) for _ in range(2))
    saved.loss_scale, loaded.loss_scale = (LossScale(DynamicScale(start=start)) for start in (SCALE, 2 * SCALE))
    for _ in range(3):
        saved.loss_scale.update(True)
    checkpoint.save(saved, dist, dist.run_dir, checkpoint.Progress(step=1))
    checkpoint.load(checkpoint.find(dist.run_dir.path), loaded, dist)
    assert loaded.loss_scale.state() == saved.loss_scale.state()


def test_steps_match_the_definition_with_and_without_a_scale(engine: MicroStepEngine) -> None:
    assert_valid_step(engine, 0, SCALE)
    assert_valid_step(engine, 1)


def test_a_step_that_overflows_changes_nothing_and_halves_the_scale(engine: MicroStepEngine) -> None:
    assert_valid_step(engine, 0)
    before = state_of(engine)
    _, norm = take_step(engine, 1, TOO_LARGE)
    assert norm == math.inf
    assert_equal_states(before, state_of(engine))
    assert (engine.skipped_steps, engine.loss_scale.scale) == (1, TOO_LARGE / 2)
    assert_valid_step(engine, 2)


def test_a_step_with_nan_gradients_changes_nothing(engine: MicroStepEngine) -> None:
    assert_valid_step(engine, 0)
    before = state_of(engine)
    hook = engine.module.transformer["ln_f"].weight.register_hook(lambda gradient: gradient * math.nan)
    _, norm = take_step(engine, 1)
    hook.remove()
    assert not math.isfinite(norm)
    assert_equal_states(before, state_of(engine))
    assert_valid_step(engine, 2)


def test_a_step_above_the_limit_of_the_norm_changes_nothing(engine: MicroStepEngine) -> None:
    assert_valid_step(engine, 0)
    before = state_of(engine)
    engine.step_skip.limit = 1e-9
    take_step(engine, 1)
    assert_equal_states(before, state_of(engine))
    engine.step_skip.limit = math.inf
    assert_valid_step(engine, 2)
