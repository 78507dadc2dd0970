"""bf16 parameters with fp32 master weights: accumulation, steps, memory and checkpoints."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training.dist import Degrees, Dist, Mesh
from ezpz_llm.training.engine import group_norms
from ezpz_llm.training.engine.base import MicroStepEngine
from ezpz_llm.training.engine.build import build_engine
from ezpz_llm.training.engine.live_memory import live_storages, live_tensor_memory
from ezpz_llm.training.layout.memory import memory_per_rank, total
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import decay_groups, init_weights
from ezpz_llm.training.model.parameters import parameter_count

CONFIG = get_model_config("tiny-gpt2", n_layer=2, block_size=32, vocab_size=64, vocab_multiple=32, dropout=0.0)
MICRO_STEPS = 3


def make(tmp_path, precision: str = "bf16", clip: float = 0.0) -> MicroStepEngine:
    dist = Dist(RankInfo(0, 1, 0, 1, 0, "test"), torch.device("cpu"), None, Mesh(Degrees(1), 0), RunDir(tmp_path))
    resolved = resolve(Request("ddp", world_size=1, global_batch=6, accumulation=MICRO_STEPS, clip=clip,
                               precision=precision))
    model = GPT(CONFIG)
    init_weights(model, CONFIG, 1)
    engine = build_engine(model, resolved, dist, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                          param_groups=decay_groups(model, 0.1))
    assert isinstance(engine, MicroStepEngine)
    return engine


def batch(number: int) -> Tensor:
    return torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(number))


def backward(engine: MicroStepEngine) -> None:
    for number in range(MICRO_STEPS):
        tokens = batch(number)
        engine.backward(engine.module(tokens[:, :-1], tokens[:, 1:]), is_last=number == MICRO_STEPS - 1)


def masters(engine: MicroStepEngine) -> dict[str, Tensor]:
    return {part.name: part.tensors["weight"].clone() for part in engine.training_state().slices()}


def test_gradients_of_micro_steps_are_added_in_fp32(tmp_path) -> None:
    engine = make(tmp_path)
    assert engine.masters is not None
    backward(engine)
    engine.show_gradients()
    plain = GPT(CONFIG)
    init_weights(plain, CONFIG, 1)
    plain.bfloat16()
    sums = {name: torch.zeros(parameter.shape) for name, parameter in plain.named_parameters()}
    for number in range(MICRO_STEPS):
        tokens = batch(number)
        (plain(tokens[:, :-1], tokens[:, 1:]) / MICRO_STEPS).backward()
        for name, parameter in plain.named_parameters():
            sums[name] += parameter.grad
            parameter.grad = None
    for name, parameter in engine.module.named_parameters():
        assert parameter.grad is None
        gradient = engine.masters[parameter].grad
        assert gradient is not None
        assert torch.equal(gradient, sums[name])
        assert not torch.equal(gradient, gradient.bfloat16().float()), "the sum was not computed in fp32"
    exact = torch.stack([gradient.double().norm() for gradient in sums.values()]).norm()
    assert engine.step(0.0).item() == pytest.approx(exact.item(), rel=1e-6)
    backward(engine)
    assert engine.step(0.0).item() == pytest.approx(exact.item(), rel=1e-6), "gradients of two steps were added"
    assert engine.step(0.0) == 0, "a parameter that no backward pass reached has a gradient of an earlier step"


def test_gradients_of_a_part_of_the_model_are_added_in_fp32(tmp_path) -> None:
    """Gradients of a bucket are added when the backward pass has computed all of them, or at its end."""
    engine = make(tmp_path)
    assert engine.masters is not None
    gain = engine.module.transformer["ln_f"].weight
    factors = torch.linspace(1, 2, len(gain)).bfloat16()
    for number in range(MICRO_STEPS):
        engine.backward((gain * factors * 0.01 ** number).sum(), is_last=number == MICRO_STEPS - 1)
        assert gain.grad is None
    engine.show_gradients()
    parts = [(factors * 0.01 ** number / MICRO_STEPS).bfloat16().float() for number in range(MICRO_STEPS)]
    torch.testing.assert_close(engine.masters[gain].grad, sum(parts, torch.zeros(len(gain))), rtol=1e-2, atol=0)
    assert not torch.equal(engine.masters[gain].grad, engine.masters[gain].grad.bfloat16().float())
    expected = engine.masters[gain].grad.norm().item()
    assert engine.step(0.0).item() == pytest.approx(expected, rel=1e-6)


def test_steps_smaller_than_a_rounding_are_kept_by_the_masters(tmp_path) -> None:
    engine = make(tmp_path)
    first = masters(engine)
    assert all(torch.equal(value, value.bfloat16().float()) for value in first.values()), "not rounded initially"
    for _ in range(3):
        backward(engine)
        engine.step(1e-7)
    assert all(not torch.equal(value, first[name]) for name, value in masters(engine).items())
    gains = [parameter for name, parameter in engine.module.named_parameters() if name.endswith("ln_1.weight")]
    assert all(torch.equal(gain, torch.ones_like(gain)) for gain in gains), "3e-7 is below bf16's resolution at 1"
    for _, parameter in engine.module.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, engine.masters[parameter].bfloat16())


def test_updates_of_large_models_are_measured_on_evenly_spaced_rows(
        tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of all weights would need memory that a run with a large model does not have."""
    ratios = []
    for copied in (2 ** 28, 2 ** 17):
        monkeypatch.setattr(group_norms, "_COPIED", copied)
        engine = make(tmp_path)
        engine.step_skip.measure(engine.training_state())
        backward(engine)
        engine.step(1e-3)
        norms = engine.step_skip.measured()
        assert norms is not None
        ratios.append((norms.sums[2] / norms.sums[1]).tolist())
    assert ratios[0] != ratios[1]
    assert ratios[1] == pytest.approx(ratios[0], rel=0.05)


def test_rank_holds_18_bytes_per_parameter(tmp_path) -> None:
    gc.collect()
    storages = live_storages()
    engine = make(tmp_path)
    backward(engine)
    engine.step(1e-3)
    measured = live_tensor_memory(engine, storages)
    size = parameter_count(CONFIG)
    assert {kind: measured[kind] for kind in ("parameters", "gradients", "moments", "master")} == {
        "parameters": 2 * size, "gradients": 4 * size, "moments": 8 * size, "master": 4 * size}
    assert total(memory_per_rank(engine.layout, CONFIG, 1, precision="bf16"), "device") == 18 * size
    assert total(memory_per_rank(engine.layout, CONFIG, 1, precision="bf16_autocast"), "device") == 16 * size


@pytest.mark.parametrize(("saved", "loaded"), [("bf16", "bf16"), ("bf16", "fp32"), ("bf16_autocast", "bf16")])
def test_any_recipe_resumes_from_any_other(tmp_path, saved: str, loaded: str) -> None:
    source, target = make(tmp_path, saved), make(tmp_path, loaded)
    backward(source)
    source.step(1e-3)
    from_state, to_state = source.training_state(), target.training_state()
    for from_slice, to_slice in zip(from_state.slices(), to_state.slices(), strict=True):
        assert from_slice.name == to_slice.name
        for kind, tensor in to_slice.tensors.items():
            assert tensor.dtype == torch.float32
            tensor.copy_(from_slice.tensors[kind])
    to_state.loaded(from_state.optimizer_step)
    norms = []
    for engine in (source, target):
        backward(engine)
        norms.append(engine.step(1e-3).item())
    assert norms[0] == pytest.approx(norms[1], rel=0 if saved == loaded else 3e-2)
    apart = [(masters(target)[name] - value).abs().max().item() for name, value in masters(source).items()]
    assert max(apart) == 0 if saved == loaded else max(apart) < 2.1e-3


def test_a_step_of_nan_changes_nothing(tmp_path) -> None:
    engine = make(tmp_path)
    first = masters(engine)
    backward(engine)
    engine.show_gradients()
    next(iter(engine.masters.values())).grad.fill_(torch.nan)
    engine.step(1e-3)
    assert all(torch.equal(value, first[name]) for name, value in masters(engine).items())
    backward(engine)
    assert torch.isfinite(engine.step(1e-3))
