"""Dropout: its probability and scale in every place, new masks in every pass, and other masks for other heads."""

from __future__ import annotations

import math

import pytest
import torch
from one_layer import LENGTH, micro_batches, one_layer
from torch import Tensor, nn

from ezpz_llm.training.model.gpt import GPT, CausalProduct
from ezpz_llm.training.model.init import init_weights
from ezpz_llm.training.model.tensor_parallel import RankedDropout

P = 0.25
"""Drop probability."""


def model_of(dropout: float = P) -> GPT:
    config = one_layer(dropout)
    model = GPT(config)
    init_weights(model, config, 1)
    return model


def loss_of(model: GPT) -> Tensor:
    return model(*micro_batches(0)[0])


def assert_share(kept: Tensor) -> None:
    """Check the share of dropped elements, to six standard deviations: about one false alarm in 5e8 masks."""
    assert abs(1 - kept.float().mean().item() - P) <= 6 * math.sqrt(P * (1 - P) / kept.numel())


def test_every_module_drops_and_scales_elements() -> None:
    model, outputs = model_of(), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(
                lambda _, inputs, output, name=name: outputs.update({name: (inputs[0], output)}))
    torch.manual_seed(1)
    loss_of(model)
    assert len(outputs) == 3  # after the embedding, the attention, and the MLP
    for x, y in outputs.values():
        nonzero = x != 0
        assert_share((y != 0)[nonzero])
        kept = nonzero & (y != 0)
        torch.testing.assert_close(y[kept], x[kept] / (1 - P))


def probabilities_of(product: nn.Module) -> Tensor:
    """Return the attention probabilities of equal scores: the output for the identity matrix as values."""
    zeros = torch.zeros(4, 2, LENGTH, LENGTH)
    return product(zeros, zeros, torch.eye(LENGTH).expand(4, 2, LENGTH, LENGTH))


@pytest.mark.parametrize("product", [CausalProduct(P), RankedDropout(CausalProduct(P), 1)],
                         ids=["one process", "tensor-parallel rank"])
def test_attention_drops_and_scales_probabilities_in_training_only(product: nn.Module) -> None:
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    undropped = (1 / torch.arange(1, LENGTH + 1.0))[:, None].expand(LENGTH, LENGTH)
    torch.manual_seed(2)
    rows = probabilities_of(product.train())
    assert not rows[..., ~visible].any()
    kept = rows[..., visible] != 0
    assert_share(kept)
    scaled = (undropped[visible] / (1 - P)).expand_as(kept)
    torch.testing.assert_close(rows[..., visible][kept], scaled[kept])
    torch.testing.assert_close(probabilities_of(product.eval()), (undropped * visible).expand_as(rows))


def test_passes_have_different_masks_and_evaluations_none() -> None:
    model = model_of()
    assert loss_of(model).item() != loss_of(model).item()
    assert loss_of(model.eval()).item() == loss_of(model_of(dropout=0.0)).item()


def test_tensor_parallel_ranks_have_different_masks_and_equal_generator_states() -> None:
    outputs, states = [], []
    for rank in (0, 1, 1):
        torch.manual_seed(4)
        outputs.append(probabilities_of(RankedDropout(CausalProduct(P), rank).train()))
        states.append(torch.get_rng_state())
    assert not torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[1], outputs[2])
    assert torch.equal(states[0], states[1])
