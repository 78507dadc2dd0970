"""Checks of initial weights: their distribution, and that every part of a parameter has the values of the whole.

Gains are 1 and biases 0. Matrices are normal, with the standard deviations of GPT-2 (Radford et al. 2019) or of
Llama, where linear layers have fan_in^-1/2. Projections into the residual stream of L blocks are divided by
sqrt(2 L). No two values are drawn twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ezpz_llm.training.model.config import ModelConfig, get_model_config
from ezpz_llm.training.model.init import initial_values
from ezpz_llm.training.model.parameters import parameter_shapes, whole_box

MODELS = tuple(get_model_config(f"tiny-{name}", n_layer=2, n_head=2, n_kv_head=2, n_embd=64, block_size=70,
                                vocab_size=200, intermediate_size=600, tied=False) for name in ("gpt2", "llama"))
"""Models of GPT-2's and Llama's scheme, with matrices of several tiles."""
_EDGES = (0, 1, 63, 65, 70, 511, 513, 600)
"""Edges of parts: on both sides of tiles, which have 64 rows and 512 columns."""


def find_problems() -> Iterator[str]:
    """Yield a message for each parameter with wrong initial weights."""
    for config in MODELS:
        drawn = []
        for seed in (1, 2):
            values = initial_values(config, seed)
            for name, shape in parameter_shapes(config).items():
                whole = values(name, whole_box(shape))
                yield from _check_values(name, whole, config)
                for sides in itertools.product(*(_sides(length) for length in shape)):
                    if not torch.equal(values(name, sides), whole[tuple(slice(*side) for side in sides)]):
                        yield f"the part {sides} of the initial {name} differs from the whole"
                        break
                if whole.dim() > 1:
                    drawn.append(whole.flatten().view(torch.int64))
        if len(torch.cat(drawn).unique()) < sum(map(len, drawn)):
            yield f"initial weights of a model of {config.init}'s scheme are repeated"


def _sides(length: int) -> list[tuple[int, int]]:
    edges = [edge for edge in _EDGES if edge < length]
    return [(0, length), *itertools.pairwise([*edges, length])]


def _check_values(name: str, whole: Tensor, config: ModelConfig) -> Iterator[str]:
    """Check a constant, or the mean and deviation to six standard errors: one false alarm in 5e8 matrices."""
    if whole.dim() == 1:
        constant = float(name.endswith(".weight"))
        if not (whole == constant).all():
            yield f"the initial {name} is not {constant:g}"
        return
    deviation, count = _deviation(name, whole.shape[1], config), whole.numel()
    mean = whole.double().mean().item()
    actual = whole.double().square().mean().sqrt().item()
    if not abs(mean) <= 6 * deviation / math.sqrt(count):
        yield f"the initial {name} has a mean of {mean:.3g}"
    if not abs(actual / deviation - 1) <= 6 / math.sqrt(2 * count):
        yield f"the initial {name} has a standard deviation of {actual:.4g}, not {deviation:.4g}"


def _deviation(name: str, fan_in: int, config: ModelConfig) -> float:
    if "wte" in name or "wpe" in name:
        return 0.02
    if "c_proj" in name:
        return (config.n_embd ** -0.5 if config.init == "llama" else 0.02) / math.sqrt(2 * config.n_layer)
    return fan_in ** -0.5 if config.init == "llama" else 0.02
