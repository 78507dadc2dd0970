"""Certify targets for five models that are not part of ezpz_llm.

The models are Qwen3, a vision transformer, two U-Nets, and an MLP with two losses.

    ezpz-llm certify --target examples/certify/five_models.py:unet_batches
    ezpz-llm certify --target examples/certify/five_models.py:qwen3 --layouts zero3,fsdp2 --dtype bf16

Qwen3 and the vision transformer require the package transformers, which builds them from configurations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ezpz_llm import Target

SAMPLES = 8
"""Samples per micro-batch over all ranks, divisible by 1, 2, 4, and 8 ranks."""


def drawn(seed: int, number: int) -> torch.Generator:
    """Return the random generator of a micro-batch, the same on every rank."""
    return torch.Generator().manual_seed(100_000 * seed + number)


def qwen3() -> Target:
    """Return a target that trains Qwen3 on tokens with two possible successors each.

    Qwen3 has norms for queries and keys, grouped keys and values, and a head that is tied to the embedding.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=32,
                         tie_word_embeddings=True, use_cache=False)
    return Target(module=lambda: Qwen3ForCausalLM(config), batch=sentences, loss=next_token)


def sentences(seed: int, number: int, dp_rank: int, dp_size: int) -> Tensor:
    """Return tokens (samples, 25)."""
    generator = drawn(seed, number)
    rows = [torch.randint(64, (SAMPLES,), generator=generator)]
    for choice in torch.randint(2, (24, SAMPLES), generator=generator):
        rows.append((5 * rows[-1] + 7 * choice + 1) % 64)
    return torch.stack(rows, dim=1).chunk(dp_size)[dp_rank]


def next_token(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens[:, :-1]).logits.float()
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def vit() -> Target:
    """Return a target that trains a vision transformer to find the brightest quarter of an image.

    `qkv_bias` is False because the bias of keys has no gradient: it adds the same value to all scores of a query,
    which softmax ignores.
    """
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=16, patch_size=4, num_channels=1, hidden_size=32, num_hidden_layers=3,
                       num_attention_heads=4, intermediate_size=64, qkv_bias=False, hidden_dropout_prob=0.1,
                       num_labels=4)
    return Target(module=lambda: ViTForImageClassification(config), batch=quarters, loss=classes)


def quarters(seed: int, number: int, dp_rank: int, dp_size: int) -> dict[str, Tensor]:
    """Return images (samples, 1, 16, 16) and their classes."""
    pictures = torch.randn(SAMPLES, 1, 16, 16, generator=drawn(seed, number))
    brightest = functional.avg_pool2d(pictures, 8).flatten(1).argmax(-1)
    return {"pixel_values": pictures[dp_rank::dp_size], "labels": brightest[dp_rank::dp_size]}


def classes(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(pixel_values=batch["pixel_values"]).logits.float(), batch["labels"])


class UNet(nn.Module):
    """U-Net of two levels with a norm after each convolution.

    It downsamples to a half and a quarter, and concatenates each level with the upsampled one (Ronneberger et al.
    2015, arXiv:1505.04597). Like the U-Net of diffusion models (Ho et al. 2020, arXiv:2006.11239), it is smooth: it
    uses SiLU and strided convolutions, because gradients of ReLU and max pooling jump where rounding moves an input
    across a kink.
    """

    def __init__(self, norm: Any, outputs: int) -> None:
        super().__init__()
        self.first = self._twice(1, 8, norm)
        self.narrow = nn.ModuleList(nn.Conv2d(width, width, 2, stride=2) for width in (8, 16))
        self.down = nn.ModuleList([self._twice(8, 16, norm), self._twice(16, 32, norm)])
        self.widen = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in (16, 8))
        self.up = nn.ModuleList([self._twice(32, 16, norm), self._twice(16, 8, norm)])
        self.last = nn.Conv2d(8, outputs, 1)

    @staticmethod
    def _twice(inputs: int, outputs: int, norm: Any) -> nn.Module:
        # No bias: the norm that follows subtracts the mean, so a bias would have no gradient.
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), norm(outputs), nn.SiLU(),
                             nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), norm(outputs), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        beside = [self.first(x)]
        for narrow, level in zip(self.narrow, self.down, strict=True):
            beside.append(level(narrow(beside[-1])))
        x = beside.pop()
        for widen, level in zip(self.widen, self.up, strict=True):
            x = level(torch.cat([beside.pop(), widen(x)], dim=1))
        return self.last(x)


def unet_groups() -> Target:
    """Return a target that predicts the noise in images of stripes, with GroupNorm."""
    return Target(module=lambda: UNet(lambda channels: nn.GroupNorm(4, channels), 1), batch=stripes, loss=noise)


def unet_batches() -> Target:
    """Return a target that segments the same stripes, with BatchNorm and running statistics."""
    return Target(module=lambda: UNet(nn.BatchNorm2d, 2), batch=stripes, loss=segments)


def stripes(seed: int, number: int, dp_rank: int, dp_size: int) -> dict[str, Tensor]:
    """Return images (samples, 1, 16, 16) of stripes with noise, the noise, and the segments."""
    generator = drawn(seed, number)
    slopes, shifts = torch.randn(2, SAMPLES, 1, 1, generator=generator)
    places = torch.arange(16.0)
    clean = torch.sin(slopes * places[:, None] + places / 2 + 3 * shifts)[:, None]
    added = torch.randn(clean.shape, generator=generator)
    return {name: value.chunk(dp_size)[dp_rank] for name, value in (("picture", clean + added), ("noise", added),
                                                                    ("segment", (clean[:, 0] > 0).long()))}


def noise(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch["picture"]).float(), batch["noise"])


def segments(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["picture"]).float(), batch["segment"])


class TwoHeads(nn.Module):
    """Residual layers with dropout, a classification head, and a reconstruction head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 48), nn.GELU(), nn.Dropout(0.1),
                                                 nn.Linear(48, 16)) for _ in range(3))
        self.head, self.back = nn.Linear(16, 5), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.trunk:
            x = x + layer(x)
        return {"logits": self.head(x), "back": self.back(x)}


def two_losses() -> Target:
    """Return a target with a classification loss plus a tenth of a reconstruction loss."""
    return Target(module=TwoHeads, batch=vectors, loss=both)


def vectors(seed: int, number: int, dp_rank: int, dp_size: int) -> tuple[Tensor, Tensor]:
    """Return vectors (samples, 16) and the index of the largest of their first five elements."""
    x = torch.randn(SAMPLES, 16, generator=drawn(seed, number))
    return x.chunk(dp_size)[dp_rank], x[:, :5].argmax(-1).chunk(dp_size)[dp_rank]


def both(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    given = model(x)
    return functional.cross_entropy(given["logits"].float(), y) + functional.mse_loss(given["back"].float(), x) / 10
