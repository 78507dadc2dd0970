"""Checks of the parts of a model that certify's two models do not have, alone and over two ranks.

Each architecture is compared with the step definition: the whole model, its tensor-parallel parts on two ranks,
and its two pipeline stages, one after the other. Sequences contain several documents, which do not attend to each
other. Gains and biases have random values, so that no parameter has a vanishing gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ezpz_llm.certify import plain_step
from ezpz_llm.certify.cases import load_layout
from ezpz_llm.certify.one_process import settings_of
from ezpz_llm.certify.plain_step import IGNORED, MicroBatch, Tensors
from ezpz_llm.certify.thread_ranks import run_ranks
from ezpz_llm.dist import Degrees, Mesh
from ezpz_llm.engine.build import assemble
from ezpz_llm.model.config import ModelConfig, get_model_config
from ezpz_llm.model.document_mask import mask_documents
from ezpz_llm.model.init import initial_values
from ezpz_llm.model.parameters import Box, parameter_shapes, placement_of, size

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
"""Relative error of a loss or gradient."""


def find_problems() -> Iterator[str]:
    """Yield a message for each loss or gradient that differs from the step definition."""
    for name, config in SHAPES.items():
        yield from _check_shape(name, config, seed=1)


def _check_shape(name: str, config: ModelConfig, seed: int) -> Iterator[str]:
    weights, batch = _draw(config, seed)
    settings = settings_of(config, clip=0.0, end_of_text=_DOCUMENT)
    loss, gradients = plain_step.gradients(weights, [batch], settings)
    alone = _assemble(config, "ddp", Mesh(Degrees(1), 0), weights)
    yield from _compare(name, [(alone, _backward([alone], batch))], loss, gradients)

    def backward_on_rank(mesh: Mesh) -> tuple[nn.Module, float]:
        """Compute the loss and the gradients of one tensor-parallel rank."""
        part = _assemble(config, "tp2", mesh, weights)
        return part, _backward([part], batch)

    yield from _compare(f"{name}, on two tensor-parallel ranks", run_ranks(Degrees(dp=1, tp=2), backward_on_rank),
                        loss, gradients)
    stages = [_assemble(config, "pp2", Mesh(Degrees(dp=1, pp=2), rank), weights) for rank in range(2)]
    loss_of_stages = _backward(stages, batch)
    if config.tied:  # each stage has the gradient of its copy
        stages[0].transformer["wte"].weight.grad += stages[1].lm_head.weight.grad
        stages[1].lm_head.weight.grad.copy_(stages[0].transformer["wte"].weight.grad)
    yield from _compare(f"{name}, in two pipeline stages", [(stage, loss_of_stages) for stage in stages],
                        loss, gradients)


def _draw(config: ModelConfig, seed: int) -> tuple[dict[str, Tensor], MicroBatch]:
    """Draw weights by name, and tokens of several documents with some targets ignored."""
    values, generator = initial_values(config, seed), torch.Generator().manual_seed(seed)
    weights = {name: values(name, tuple((0, length) for length in shape))
               + 0.1 * torch.randn(shape, generator=generator)
               for name, shape in parameter_shapes(config).items()}
    rows = torch.randint(1, config.vocab_size, (3, config.block_size + 1), generator=generator)
    rows[0, 5] = rows[0, 6] = rows[1, 0] = rows[1, 17] = _DOCUMENT
    targets = rows[:, 1:].clone()
    targets[1:, 3:9] = IGNORED
    return weights, (rows[:, :-1].contiguous(), targets)


def _assemble(config: ModelConfig, layout: str, mesh: Mesh, weights: Tensors) -> nn.Module:
    """Build a rank's part of a model with these weights."""
    def values(name: str, box: Box) -> Tensor:
        """Return a part of a weight."""
        return weights[name][tuple(slice(*side) for side in box)]

    part = assemble(config, load_layout(layout), mesh, seed=0, weights=values)
    mask_documents(part, _DOCUMENT)
    return part


def _backward(stages: list[nn.Module], batch: MicroBatch) -> float:
    """Compute the gradients of consecutive parts of a model, and return the loss."""
    x, targets = batch
    for stage in stages[:-1]:
        x = stage(x, sequences=batch[0])
    loss: Tensor = stages[-1](x, targets, sequences=batch[0])
    loss.backward()
    return loss.item()


def _compare(title: str, parts: list[tuple[nn.Module, float]], loss: float, gradients: Tensors) -> Iterator[str]:
    """Compare the loss of each part, and the gradients of each of its parameters, with the whole model's."""
    for rank, (part, actual) in enumerate(parts):
        if not abs(actual / loss - 1) <= TOLERANCE:
            yield f"{title}: the loss is {actual:.7g} on rank {rank}, not {loss:.7g}"
        for name, parameter in part.named_parameters():
            at = placement_of(name, parameter)
            pieces = torch.split(parameter.grad.flatten(), [size(box) for box in at.boxes])
            whole = gradients[at.name]
            differences = [piece - whole[tuple(slice(*side) for side in box)].flatten()
                           for piece, box in zip(pieces, at.boxes, strict=True)]
            error = (torch.cat(differences).norm() / whole.norm()).item()
            if not error <= TOLERANCE:
                yield f"{title}: the gradient of {at.name} on rank {rank} has a relative error of {error:.2g}"
