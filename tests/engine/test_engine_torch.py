"""Engine on a single rank: accumulation, clipping, precision, loss scale."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training.dist import Degrees, Dist, Mesh
from ezpz_llm.training.engine.base import MicroStepEngine
from ezpz_llm.training.engine.build import build_engine
from ezpz_llm.training.engine.fsdp2_engine import _sum_and_divide
from ezpz_llm.training.engine.gradients import norm_and_clip, tensor_norms
from ezpz_llm.training.engine.optimizer_state import make_optimizer
from ezpz_llm.training.engine.precision import LossScale
from ezpz_llm.training.engine.torch_engine import TorchEngine
from ezpz_llm.training.layout.ds_config_blocks import DynamicScale
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.init import decay_groups

ALONE = Mesh(Degrees(1), 0)


class Net(nn.Module):
    """Regression model that returns its loss, as engines require."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.dtype = torch.float32

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(inputs)
        self.dtype = hidden.dtype
        return (hidden.float() - targets).square().mean()


def make(tmp_path, *, accumulation: int = 1, precision: str = "fp32", clip: float = 0.1) -> MicroStepEngine:
    dist = Dist(RankInfo(0, 1, 0, 1, 0, "test"), torch.device("cpu"), None, Mesh(Degrees(1), 0), RunDir(tmp_path))
    resolved = resolve(Request("ddp", world_size=1, global_batch=16, accumulation=accumulation, clip=clip,
                               precision=precision))
    model = Net()
    engine = build_engine(model, resolved, dist, lr=1e-2, betas=(0.9, 0.95), eps=1e-8,
                          param_groups=decay_groups(model, 0.1))
    assert isinstance(engine, MicroStepEngine)
    return engine


def train(engine: MicroStepEngine, steps: int = 8) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(16, 8, generator=generator)
        parts = inputs.chunk(engine.batch.accumulation)
        total = 0.0
        for index, part in enumerate(parts):
            loss = engine.module(part, part.sum(1, keepdim=True))
            engine.backward(loss, is_last=index == len(parts) - 1)
            total += loss.item() / len(parts)
        losses.append(total)
        norms.append(engine.step(1e-2).item())
    return losses, norms


@pytest.mark.parametrize("accumulation", [2, 4, 16])
def test_accumulation_is_the_full_batch(tmp_path, accumulation: int) -> None:
    losses, norms = train(make(tmp_path))
    actual = train(make(tmp_path, accumulation=accumulation))
    assert actual[0] == pytest.approx(losses, rel=1e-6)
    assert actual[1] == pytest.approx(norms, rel=1e-5)
    assert min(norms) > 0.1  # clipping is at work
    assert losses[-1] < losses[0]


def stepped_on(net: Net, kind: str, clip: float, loss_scale: float = 1.0) -> tuple[float, list[torch.Tensor]]:
    """Return the norm, and the gradients that an optimizer receives, computed from its first moments."""
    optimizer = make_optimizer([{"params": list(net.parameters())}], {"lr": 1e-2, "betas": (0.5, 0.9)}, kind)
    (net(torch.ones(4, 8), torch.ones(4, 1)) * loss_scale).backward()
    norm = norm_and_clip(net, ALONE, optimizer, clip, loss_scale).item()
    optimizer.step()
    return norm, [optimizer.state[parameter]["exp_avg"] * 2 for parameter in net.parameters()]


@pytest.mark.parametrize("kind", ["adamw", "adamw_unfused"])
def test_the_norm_and_the_clipping_are_torchs(kind: str) -> None:
    reference = Net()
    reference(torch.ones(4, 8), torch.ones(4, 1)).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1).item()
    # A loss scale is undone before clipping.
    for loss_scale in (1.0, 1024.0):
        norm, gradients = stepped_on(Net(), kind, 0.1, loss_scale)
        assert norm == pytest.approx(expected, rel=1e-6)
        for gradient, parameter in zip(gradients, reference.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["adamw", "adamw_unfused"])
def test_without_clipping_gradients_are_unchanged(kind: str) -> None:
    reference = Net()
    reference(torch.ones(4, 8), torch.ones(4, 1)).backward()
    # Powers of two and norms below the limit change nothing either.
    for clip, loss_scale in ((0.0, 1.0), (0.0, 1024.0), (1e3, 1024.0)):
        _, gradients = stepped_on(Net(), kind, clip, loss_scale)
        assert all(torch.equal(gradient, parameter.grad)
                   for gradient, parameter in zip(gradients, reference.parameters(), strict=True))


def test_the_loss_scale_halves_on_overflow_and_grows_when_it_may() -> None:
    scale = LossScale(DynamicScale())
    scale.update(finite=False)
    assert scale.scale == 32768.0
    for _ in range(1 + DynamicScale().window):
        assert scale.scale == 32768.0
        scale.update(finite=True)
    assert (scale.scale, scale.good_steps) == (65536.0, 0)
    restored = LossScale(DynamicScale())
    restored.restore(scale.state())
    assert restored.scale == scale.scale


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16_autocast", torch.bfloat16)])
def test_precision_holds_in_training_and_in_evaluation(tmp_path, precision: str, dtype: torch.dtype) -> None:
    engine = make(tmp_path, precision=precision)
    losses, _ = train(engine)
    assert losses[-1] < losses[0]
    assert engine.module.dtype == dtype
    engine.module.dtype = None
    weights = [parameter.clone() for parameter in engine.module.parameters()]
    with engine.evaluating():
        assert not engine.module.training
        assert not engine.module(torch.ones(4, 8), torch.ones(4, 1)).requires_grad
    assert engine.module.dtype == dtype
    assert engine.module.training
    assert all(parameter.dtype == torch.float32 for parameter in engine.module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, engine.module.parameters(), strict=True))


def test_training_mode_comes_back_after_an_error(tmp_path) -> None:
    engine = make(tmp_path)
    with pytest.raises(ZeroDivisionError), engine.evaluating():
        raise ZeroDivisionError
    assert engine.module.training


@pytest.mark.parametrize("shape", [(2 ** 22,), (1024, 4097), (3,), ()])
def test_norms_of_large_tensors_are_exact(shape: tuple[int, ...]) -> None:
    """In fp32 on a CPU, torch's norm of 2^22 normal values is 5e-5 too small."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    (norm,) = tensor_norms([tensor.t() if len(shape) == 2 else tensor])
    assert norm.item() == pytest.approx(tensor.double().norm().item(), rel=4 * 2 ** -24)


def test_fp16_on_a_cpu_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="fp16_autocast is unsupported on a CPU"):
        make(tmp_path, precision="fp16_autocast")


def test_adamw_is_fused_unless_that_is_not_wanted() -> None:
    groups = [{"params": list(Net().parameters()), "weight_decay": 0.1}]
    assert make_optimizer(groups, {"lr": 1e-3}).defaults["fused"] is True
    assert make_optimizer(groups, {"lr": 1e-3}, fused=False).defaults["fused"] is False


def test_one_rank_uses_the_gradients_of_torch(tmp_path) -> None:
    engine = make(tmp_path)
    assert isinstance(engine, TorchEngine)
    assert engine._reducer is None


def test_torch_with_incorrect_fully_shard_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_force_sum_reduction_for_comms", raising=False)
    part = torch.nn.Linear(1, 1)
    part.__class__ = type("FSDPLinear", (FSDPModule, torch.nn.Linear), {})  # as fully_shard does
    with pytest.raises(UserError, match="incorrect on cpu") as raised:
        _sum_and_divide(part, "cpu")
    assert "--ds-config zero3" in raised.value.instead
