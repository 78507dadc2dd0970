"""What is trained: an MLP that has to find a fixed linear map from samples of it."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from ezpz_llm.dist.seeds import seed_for

WIDTHS = (128, 1024, 512, 256, 128, 128)
_HELD_OUT = 2**24 - 1  # an index that no rank has


class Mlp(nn.Module):
    """Linear layers of WIDTHS with ReLU between, initialised alike on every rank; its forward pass is the loss."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        # Only this model's initialisation is to be the same everywhere: the global generator is left as it was.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_for(seed, "init") % 2**63)
            layers = [nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)]
        self.layers = nn.Sequential(*itertools.chain.from_iterable((layer, nn.ReLU()) for layer in layers[:-1]),
                                    layers[-1])

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """(B, 128) and (B, 128) to the mean squared error, 0-d; an MLP that says 0 has about 1."""
        return nn.functional.mse_loss(self.layers(inputs).float(), targets)


class Samples:
    """An endless stream of (inputs, targets), another for each data-parallel rank."""

    def __init__(self, seed: int, dp_rank: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed_for(seed, "init", 1) % 2**63)
        self._map = torch.randn(WIDTHS[0], WIDTHS[-1], generator=generator) / WIDTHS[0] ** 0.5
        self._generator = torch.Generator().manual_seed(seed_for(seed, "data", dp_rank) % 2**63)
        self._device = device

    def take(self, count: int) -> tuple[Tensor, Tensor]:
        """The next `count` samples, (count, 128) each, on the device."""
        inputs = torch.randn(count, WIDTHS[0], generator=self._generator)
        return inputs.to(self._device), (inputs @ self._map).to(self._device)


def held_out(seed: int, device: torch.device) -> Samples:
    """A stream that is the same on every rank and trains none."""
    return Samples(seed, _HELD_OUT, device)
