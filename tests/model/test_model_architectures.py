"""Parts of Qwen3, OLMo 2, and Llama 3.2 against the step definition: alone, on two ranks, and in two stages.

Sequences have several documents, which do not attend to each other, and ignored targets. There is a z-loss, with
and without chunks. Gains and biases have random values, so that every parameter has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from thread_ranks import run_ranks
from torch import Tensor, nn

from ezpz_llm.training.data.samples import IGNORED
from ezpz_llm.training.dist import Degrees, Mesh
from ezpz_llm.training.engine.build import assemble
from ezpz_llm.training.layout import ds_config
from ezpz_llm.training.layout.layout import read_layout
from ezpz_llm.training.model.config import ModelConfig, get_model_config
from ezpz_llm.training.model.document_mask import mask_documents
from ezpz_llm.training.model.init import initial_values
from ezpz_llm.training.model.loss import Reduction, configure_head
from ezpz_llm.training.model.parameters import Box, parameter_shapes, placement_of, size, whole_box
from ezpz_llm.verify.certify import plain_step
from ezpz_llm.verify.certify.one_process import settings_of
from ezpz_llm.verify.certify.plain_step import MicroBatch, Tensors

SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "vocab_size": 29, "vocab_multiple": 8}
CASES = {
    "gpt2 with exact GELU, untied, without biases": (get_model_config(
        "tiny-gpt2", **SMALL, mlp="gelu_erf", bias=False, tied=False), 0),
    "llama with scaled frequencies": (get_model_config(  # with 10, 3, 1.02 and 0.3 turns: all cases of the rule
        "tiny-llama", **SMALL, n_kv_head=2, rope_theta=100.0, rope_factor=8.0, rope_context=64), 16),
    "qwen3": (get_model_config("tiny-qwen3", **SMALL, n_kv_head=2, head_dim=12), 0),
    "olmo2": (get_model_config("tiny-olmo2", **SMALL), 16),
}
"""Model and number of tokens in a chunk of the loss."""
DOCUMENT = 0
"""Token at the start of each document."""
SEED, Z_LOSS = 1, 1e-3
TOLERANCE = 2e-5
"""Relative error: ten times the largest one over ten seeds, 1.8e-6."""


class Part(NamedTuple):
    """Part of a model after a backward pass, with the loss, the sums of rows, and the logits of the next token."""

    module: nn.Module
    loss: float
    rows: Tensor
    logits: Tensor


def alone(compute: Callable[[str, Sequence[Mesh]], list[Part]]) -> list[Part]:
    return compute("ddp", [Mesh(Degrees(1), 0)])


def on_two_ranks(compute: Callable[[str, Sequence[Mesh]], list[Part]]) -> list[Part]:
    return run_ranks(Degrees(dp=1, tp=2), lambda mesh: compute("tp2", [mesh])[0])


def in_two_stages(compute: Callable[[str, Sequence[Mesh]], list[Part]]) -> list[Part]:
    stages = compute("pp2", [Mesh(Degrees(dp=1, pp=2), rank) for rank in range(2)])
    first, last = stages[0].module.transformer["wte"].weight, stages[1].module.lm_head.weight
    if stages[0].module.config.tied:  # each stage has the gradient of its copy
        first.grad = last.grad = first.grad + last.grad
    return stages


@pytest.mark.parametrize("division", [alone, on_two_ranks, in_two_stages])
@pytest.mark.parametrize("name", CASES)
def test_losses_logits_and_gradients_match_the_definition(
        name: str, division: Callable[[Callable[[str, Sequence[Mesh]], list[Part]]], list[Part]]) -> None:
    config, loss_chunk = CASES[name]
    weights, batch = drawn(config)

    def compute(layout: str, meshes: Sequence[Mesh]) -> list[Part]:
        """Compute with the parts of one model, one after the other."""
        parts = [assembled(config, layout, mesh, weights, loss_chunk) for mesh in meshes]
        with torch.no_grad():
            rows, logits = loss_of(parts, batch, "rows"), logits_of(parts, batch[0])
        mean = loss_of(parts, batch, "mean")
        mean.backward()
        return [Part(part, mean.item(), rows, logits) for part in parts]

    settings = settings_of(config, clip=0.0, z_loss=Z_LOSS, end_of_text=DOCUMENT)
    loss, gradients = plain_step.gradients(weights, [batch], settings)
    rows = torch.tensor([plain_step.evaluation_loss(weights, [(tokens[None], targets[None])], settings)
                         * int((targets != IGNORED).sum()) for tokens, targets in zip(*batch, strict=True)])
    (whole,) = alone(compute)
    for part in division(compute):
        assert part.loss == pytest.approx(loss, rel=TOLERANCE)
        torch.testing.assert_close(part.rows.double(), rows.double(), rtol=TOLERANCE, atol=0)
        assert error(part.logits, whole.logits) <= TOLERANCE
        for parameter_name, parameter in part.module.named_parameters():
            at = placement_of(parameter_name, parameter)
            whole_gradient = gradients[at.name]
            pieces = parameter.grad.flatten().split([size(box) for box in at.boxes])
            differences = [piece - whole_gradient[tuple(slice(*side) for side in box)].flatten()
                           for piece, box in zip(pieces, at.boxes, strict=True)]
            assert torch.cat(differences).norm() <= TOLERANCE * whole_gradient.norm(), at.name


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def drawn(config: ModelConfig) -> tuple[dict[str, Tensor], MicroBatch]:
    """Draw weights by name, and tokens of several documents with some targets ignored."""
    values, generator = initial_values(config, SEED), torch.Generator().manual_seed(SEED)
    weights = {name: values(name, whole_box(shape)) + 0.1 * torch.randn(shape, generator=generator)
               for name, shape in parameter_shapes(config).items()}
    rows = torch.randint(1, config.vocab_size, (3, config.block_size + 1), generator=generator)
    rows[0, 5] = rows[0, 6] = rows[1, 0] = rows[1, 17] = DOCUMENT
    targets = rows[:, 1:].clone()
    targets[1:, 3:9] = IGNORED
    return weights, (rows[:, :-1].contiguous(), targets)


def assembled(config: ModelConfig, layout: str, mesh: Mesh, weights: Tensors, loss_chunk: int) -> nn.Module:
    """Build a rank's part of a model with these weights."""
    def values(name: str, box: Box) -> Tensor:
        return weights[name][tuple(slice(*side) for side in box)]

    part = assemble(config, read_layout(ds_config.load(layout)), mesh, seed=0, weights=values)
    mask_documents(part, DOCUMENT)
    configure_head(part, loss_chunk, Z_LOSS)
    return part


def loss_of(parts: Sequence[nn.Module], batch: MicroBatch, reduction: Reduction) -> Tensor:
    """Compute the loss of a model from its consecutive parts."""
    x, targets = batch
    for part in parts[:-1]:
        x = part(x, sequences=batch[0])
    return parts[-1](x, targets, reduction, sequences=batch[0])


def logits_of(parts: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Compute logits (B, V) of the next token from the consecutive parts of a model."""
    for part in parts[:-1]:
        x = part(x)
    return parts[-1](x, last_only=True)[:, -1]
