"""Models written without layouts, as users have them, each with its batches and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, interpolate, mse_loss

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Training:
    """Model to train: `batch` draws `size` samples, and `loss` is their mean loss.

    Attributes:
        mixes_samples: True if the result for a sample depends on its batch, as with BatchNorm.
        eps: epsilon of AdamW. It must exceed rounding errors in gradients that are zero otherwise: the default
            epsilon scales them up to full steps.
        lr: learning rate of matrices; that of other parameters is a fifth.
    """

    module: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Batch]
    loss: Callable[[Any, Batch], Tensor]
    mixes_samples: bool = False
    eps: float = 1e-8
    lr: float = 1e-2


class TwoLosses(nn.Module):
    """MLP with its trunk in a ModuleList, a keyword-only input, and two outputs: logits and a reconstruction."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)) for _ in range(3))
        self.head, self.back = nn.Linear(8, 5), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, *, x: Tensor) -> dict[str, Tensor]:
        for layer in self.trunk:
            x = x + layer(x)
        return {"logits": self.head(x), "back": self.back(x)}


def two_losses(model: Any, batch: Batch) -> Tensor:
    given = model(x=batch["x"])
    return cross_entropy(given["logits"].float(), batch["y"]) + mse_loss(given["back"].float(), batch["x"])


def vectors(generator: torch.Generator, size: int) -> Batch:
    return {"x": torch.randn(size, 8, generator=generator), "y": torch.randint(5, (size,), generator=generator)}


class RunningStatistics(nn.Module):
    """Convolutions with BatchNorm (so without biases), for 1 x 8 x 8 images, passed in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.GELU(),
                                    nn.Conv2d(6, 9, 3, stride=2, bias=False), nn.BatchNorm2d(9), nn.GELU(),
                                    nn.Flatten(), nn.Linear(81, 5))

    def forward(self, batch: dict[str, list[tuple[Tensor, int]]]) -> Tensor:
        ((pictures, _),) = batch["pictures"]
        return self.layers(pictures)


def nested_loss(model: Any, batch: Batch) -> Tensor:
    return cross_entropy(model({"pictures": [(batch["x"], 0)]}).float(), batch["y"])


def pictures(generator: torch.Generator, size: int) -> Batch:
    return {"x": torch.randn(size, 1, 8, 8, generator=generator),
            "y": torch.randint(5, (size,), generator=generator)}


class Residual(nn.Module):
    """Block of a U-Net: two convolutions with GroupNorm, to which the time's embedding is added."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(2, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(8, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, *, time: Tensor) -> Tensor:
        hidden = self.conv1(gelu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(gelu(self.norm2(hidden)))


class UNet(nn.Module):
    """U-Net that predicts the noise in 1 x 8 x 8 images: skip connections, and up-sampling to the nearest pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 8), nn.GELU())
        self.enter, self.leave = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)
        self.down = nn.ModuleList([Residual(4, 4), Residual(4, 8)])
        self.middle = Residual(8, 8)
        self.up = nn.ModuleList([Residual(16, 4), Residual(8, 4)])

    def forward(self, x: Tensor, time: Tensor) -> tuple[Tensor]:
        time, x, skips = self.time(time[:, None]), self.enter(x), []
        for block in self.down:
            x = block(x, time=time)
            skips.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        x = self.middle(x, time=time)
        for block in self.up:
            x = block(torch.cat([interpolate(x, scale_factor=2.0), skips.pop()], dim=1), time=time)
        return (self.leave(x),)


def noisy_pictures(generator: torch.Generator, size: int) -> Batch:
    time, noise = torch.rand(size, generator=generator), torch.randn(size, 1, 8, 8, generator=generator)
    clean = torch.rand(size, 1, 1, 8, generator=generator).expand(-1, 1, 8, 8)
    strength = time[:, None, None, None]
    return {"x": (1 - strength) * clean + strength * noise, "time": time, "noise": noise}


def noise_loss(model: Any, batch: Batch) -> Tensor:
    return mse_loss(model(batch["x"], time=batch["time"])[0].float(), batch["noise"])


def qwen3() -> nn.Module:
    """Return a Qwen3 of transformers with two layers, grouped queries and a tied head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=32, tie_word_embeddings=True))


def gpt2() -> nn.Module:
    """Return a GPT-2 of transformers, for tokens that are bytes, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        vocab_size=257, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=256, eos_token_id=256,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


class Lstm(nn.Module):
    """LSTM language model with two layers and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.head.weight = self.embedding.weight
        self.layers = nn.LSTM(16, 16, num_layers=2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens))[0])


def sequences(generator: torch.Generator, size: int) -> Batch:
    return {"input_ids": torch.randint(40, (size, 12), generator=generator)}


def own_loss(model: Any, batch: Batch) -> Tensor:
    return model(**batch, labels=batch["input_ids"]).loss


def next_token_loss(model: Any, batch: Batch) -> Tensor:
    tokens = batch["input_ids"]
    return cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def vit() -> nn.Module:
    """Return a ViT of transformers with two layers, a class token and learned positions."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8,
        patch_size=4, num_channels=1, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        qkv_bias=False))


def picture_loss(model: Any, batch: Batch) -> Tensor:
    return cross_entropy(model(pixel_values=batch["x"]).logits.float(), batch["y"])


TRAININGS = {
    "mlp": Training(TwoLosses, vectors, two_losses),
    "unet": Training(UNet, noisy_pictures, noise_loss, eps=3e-2, lr=5e-2),
    "norm": Training(RunningStatistics, pictures, nested_loss, mixes_samples=True),
    "qwen3": Training(qwen3, sequences, own_loss, eps=1e-3),
    "gpt2": Training(gpt2, sequences, own_loss, eps=1e-3),
    "lstm": Training(Lstm, sequences, next_token_loss),
    "vit": Training(vit, pictures, picture_loss, eps=1e-3),
}
