"""Models with parameters, buffers, outputs and calls that are rare, but valid."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from library_models import TRAININGS, Batch, Training, TwoLosses, pictures, qwen3, two_losses, vectors
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

DTYPES = (torch.complex64, torch.float64, torch.float8_e4m3fn, torch.int16, torch.int8, torch.uint16, torch.bool)


class Formats(nn.Module):
    """Parameters in fp64, channels_last and transposed; buffers of many dtypes and views, and without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 6, 3, padding=1), nn.Linear(96, 5)
        self.head.weight = nn.Parameter(torch.randn(96, 5).t() / 10)
        self.double().to(memory_format=torch.channels_last)
        for dtype in DTYPES:
            self.register_buffer(str(dtype).removeprefix("torch."), torch.randint(2, (5,)).to(dtype))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("expanded", torch.randn(2, 1).expand(2, 3))
        self.register_buffer("transposed", torch.randn(2, 3).t())
        self.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("negative", torch.randn(3, dtype=torch.complex64).conj().imag)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 2, 4, 8).to(self.conv.weight.dtype)[..., ::2].contiguous(memory_format=torch.channels_last)
        buffers = [buffer.to(torch.complex64) for buffer in self.buffers()]
        offset = sum(buffer.real.sum() + buffer.imag.sum() for buffer in buffers)
        return self.head(self.conv(x).flatten(1)) + 0.02 * offset * torch.arange(5, device=x.device)


def class_loss(model: Any, batch: Batch) -> Tensor:
    return cross_entropy(model(batch["x"]).float(), batch["y"])


class SometimesUsed(TwoLosses):
    """Model with a layer that only every second pair of calls uses: one call of each step."""

    used = (2, 3)

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, *, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        return super().forward(x=x + self.extra(x) if self.calls % 4 in self.used else x)


class SecondStepsUnused(SometimesUsed):
    """Model with a layer that both calls of every second step use."""

    used = (1, 2)


class WideFrozen(TwoLosses):
    """Model with a frozen layer that is too large for ZeRO-3 to keep gathered between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk.append(nn.Sequential(nn.Linear(8, 400), nn.Linear(400, 400), nn.Linear(400, 8)))
        self.trunk[-1][1].requires_grad_(False)


@dataclasses.dataclass
class Output:
    """Output of a layer."""

    x: Tensor
    layer: int


class Layer(nn.Module):
    """Layer that returns an object."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(8, 8)

    def forward(self, given: Output) -> Output:
        return Output(given.x + self.linear(given.x).tanh(), self.number)


class Objects(nn.Module):
    """Layers that pass objects on, and an attention and an LSTM, which read parameters of their parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, range(2)))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.lstm, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Output:
        given = Output(x, -1)
        for layer in self.layers:
            given = layer(given)
        x = given.x.view(-1, 2, 4)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return Output(self.head(self.lstm(x)[0][:, -1]), len(self.layers))


def object_loss(model: Any, batch: Batch) -> Tensor:
    return cross_entropy(model(batch["x"]).x.float(), batch["y"])


def recomputed() -> nn.Module:
    model = qwen3()
    model.gradient_checkpointing_enable()
    return model


def partly_frozen() -> nn.Module:
    model = TwoLosses()
    model.trunk[0].requires_grad_(False)
    model.head.weight.requires_grad_(False)
    return model


def adapted() -> nn.Module:
    """Return a Qwen3 whose layers train only the norms, as with adapters."""
    model = qwen3()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "k_proj" in name)
    return model


def compiled() -> nn.Module:
    model = TwoLosses()
    model.compile(backend="aot_eager")
    return model


UNUSUAL = {
    "formats": Training(Formats, pictures, class_loss, eps=1e-3),
    "sometimes": Training(SometimesUsed, vectors, two_losses, eps=1e-3),
    "resting": Training(SecondStepsUnused, vectors, two_losses, eps=1e-3),
    "wide": Training(WideFrozen, vectors, two_losses),
    "objects": Training(Objects, vectors, object_loss, eps=1e-3),
    "frozen": Training(partly_frozen, vectors, two_losses),
    "adapted": dataclasses.replace(TRAININGS["qwen3"], module=adapted),
    "recomputed": dataclasses.replace(TRAININGS["qwen3"], module=recomputed),
    "compiled": Training(compiled, vectors, two_losses),
}
