"""Checks of the parts of a model that certify's two models do not have, alone and over two ranks.

Each architecture is compared with the step definition: the whole model, its tensor-parallel parts on two ranks,
and its two pipeline stages, one after the other. Sequences contain several documents, which do not attend to each
other. There is a z-loss, with and without chunks. Gains and biases have random values, so that no parameter has a
vanishing gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ezpz_llm.training.dist import Degrees, Mesh
from ezpz_llm.training.engine.build import assemble
from ezpz_llm.training.model.config import ModelConfig, get_model_config
from ezpz_llm.training.model.document_mask import mask_documents
from ezpz_llm.training.model.init import initial_values
from ezpz_llm.training.model.loss import Reduction, configure_head
from ezpz_llm.training.model.parameters import Box, parameter_shapes, placement_of, size, whole_box
from ezpz_llm.verify.certify import plain_step, recipe
from ezpz_llm.verify.certify.cases import load_layout
from ezpz_llm.verify.certify.one_process import settings_of
from ezpz_llm.verify.certify.plain_step import IGNORED, MicroBatch, Tensors
from ezpz_llm.verify.certify.thread_ranks import run_ranks

_SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "vocab_size": 29, "vocab_multiple": 8}
SHAPES = {
    "gpt2, exact GELU, without biases, untied": get_model_config(
        "tiny-gpt2", **_SMALL, mlp="gelu_erf", bias=False, tied=False),
    "llama, scaled frequencies": get_model_config(  # with 10, 3, 1.02 and 0.3 turns: all cases of the rule
        "tiny-llama", **_SMALL, n_kv_head=2, rope_theta=100.0, rope_factor=8.0, rope_context=64),
    "qwen3": get_model_config("tiny-qwen3", **_SMALL, n_kv_head=2, head_dim=12),
    "olmo2": get_model_config("tiny-olmo2", **_SMALL),
}
_DOCUMENT = 0
"""Token at the start of each document."""
TOLERANCE = 2e-5
"""Relative error: ten times the largest one over ten seeds, 1.8e-6."""


def find_problems() -> Iterator[str]:
    """Yield a message for each loss, logit, or gradient that differs from the step definition."""
    for number, (name, config) in enumerate(SHAPES.items()):
        yield from _check_shape(name, config, seed=1, loss_chunk=(0, 16)[number % 2])


class _Expected(NamedTuple):
    """Mean loss, summed loss of each row, logits after each row without the document mask, and gradients."""

    loss: float
    rows: Tensor
    logits: Tensor
    gradients: Tensors


class _Result(NamedTuple):
    """The same numbers of a part of a model, whose parameters have the gradients."""

    part: nn.Module
    loss: float
    rows: Tensor
    logits: Tensor


def _check_shape(name: str, config: ModelConfig, seed: int, loss_chunk: int) -> Iterator[str]:
    """Check one architecture with weights and tokens of a seed."""
    weights, batch = _draw(config, seed)
    settings = settings_of(config, clip=0.0, z_loss=recipe.Z_LOSS, end_of_text=_DOCUMENT)
    loss, gradients = plain_step.gradients(weights, [batch], settings)
    rows = torch.tensor([plain_step.evaluation_loss(weights, [(tokens[None], targets[None])], settings)
                         * int((targets != IGNORED).sum()) for tokens, targets in zip(*batch, strict=True)])
    logits = plain_step.next_logits(weights, batch[0], replace(settings, end_of_text=None))
    expected = _Expected(loss, rows, logits, gradients)

    def compute(layout: str, meshes: Sequence[Mesh]) -> list[_Result]:
        """Compute with the parts of one model, one after the other."""
        parts = [_assemble(config, layout, mesh, weights, loss_chunk) for mesh in meshes]
        with torch.no_grad():
            sums, after = _forward(parts, batch, "rows"), _next_logits(parts, batch[0])
        mean = _forward(parts, batch, "mean")
        mean.backward()
        return [_Result(part, mean.item(), sums, after) for part in parts]

    alone = compute("ddp", [Mesh(Degrees(1), 0)])
    on_ranks = run_ranks(Degrees(dp=1, tp=2), lambda mesh: compute("tp2", [mesh])[0], name)
    stages = compute("pp2", [Mesh(Degrees(dp=1, pp=2), rank) for rank in range(2)])
    if config.tied:  # each stage has the gradient of its copy
        tables = [stages[0].part.transformer["wte"].weight, stages[1].part.lm_head.weight]
        total = tables[0].grad + tables[1].grad
        for table in tables:
            table.grad = total
    for where, results in (("", alone), (", on two tensor-parallel ranks", on_ranks),
                           (", in two pipeline stages", stages)):
        for rank, result in enumerate(results):
            for what, error in _errors(result, expected):
                if not error <= TOLERANCE:
                    yield f"{name}{where}: {what} on rank {rank} has a relative error of {error:.2g}"


def _draw(config: ModelConfig, seed: int) -> tuple[dict[str, Tensor], MicroBatch]:
    """Draw weights by name, and tokens of several documents with some targets ignored."""
    values, generator = initial_values(config, seed), torch.Generator().manual_seed(seed)
    weights = {name: values(name, whole_box(shape)) + 0.1 * torch.randn(shape, generator=generator)
               for name, shape in parameter_shapes(config).items()}
    rows = torch.randint(1, config.vocab_size, (3, config.block_size + 1), generator=generator)
    rows[0, 5] = rows[0, 6] = rows[1, 0] = rows[1, 17] = _DOCUMENT
    targets = rows[:, 1:].clone()
    targets[1:, 3:9] = IGNORED
    return weights, (rows[:, :-1].contiguous(), targets)


def _assemble(config: ModelConfig, layout: str, mesh: Mesh, weights: Tensors, loss_chunk: int) -> nn.Module:
    """Build a rank's part of a model with these weights."""
    def values(name: str, box: Box) -> Tensor:
        """Return a part of a weight."""
        return weights[name][tuple(slice(*side) for side in box)]

    part = assemble(config, load_layout(layout), mesh, seed=0, weights=values)
    mask_documents(part, _DOCUMENT)
    configure_head(part, loss_chunk, recipe.Z_LOSS)
    return part


def _forward(parts: Sequence[nn.Module], batch: MicroBatch, reduction: Reduction) -> Tensor:
    """Compute the loss of a model from its consecutive parts."""
    x, targets = batch
    for part in parts[:-1]:
        x = part(x, sequences=batch[0])
    loss: Tensor = parts[-1](x, targets, reduction, sequences=batch[0])
    return loss


def _next_logits(parts: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Compute logits (B, V) of the next token from the consecutive parts of a model."""
    for part in parts[:-1]:
        x = part(x)
    logits: Tensor = parts[-1](x, last_only=True)
    return logits[:, -1]


def _errors(result: _Result, expected: _Expected) -> Iterator[tuple[str, float]]:
    """Yield the relative errors of the loss, its rows, the logits, and the gradients of a part's parameters."""
    yield "the loss", abs(result.loss / expected.loss - 1)
    yield "the loss of a row", (result.rows / expected.rows - 1).abs().max().item()
    yield "the next token's logits", ((result.logits - expected.logits).norm() / expected.logits.norm()).item()
    for name, parameter in result.part.named_parameters():
        at = placement_of(name, parameter)
        pieces = parameter.grad.flatten().split([size(box) for box in at.boxes])
        whole = expected.gradients[at.name]
        differences = [piece - whole[tuple(slice(*side) for side in box)].flatten()
                       for piece, box in zip(pieces, at.boxes, strict=True)]
        yield f"the gradient of {at.name}", (torch.cat(differences).norm() / whole.norm()).item()
