"""Checks of dropout and activation recomputation.

Each element is dropped with the same probability p, and kept elements are scaled by 1/(1 - p). Every forward pass
draws new masks; evaluation uses no dropout. Tensor-parallel peers draw equal masks for replicated activations and
different masks for different heads. All other pairs of ranks draw different masks. A recomputed block uses the
masks of its first forward pass, and gradients are bitwise equal with and without recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm.training.dist import Degrees
from ezpz_llm.training.model.compile import recompute_blocks
from ezpz_llm.training.model.gpt import GPT, CausalProduct
from ezpz_llm.training.model.init import init_weights
from ezpz_llm.training.model.tensor_parallel import RankedDropout
from ezpz_llm.training.trainer.config import TrainConfig
from ezpz_llm.training.trainer.run import dropout_seed
from ezpz_llm.verify.certify.loss_scaling import LENGTH, micro_batches, small_config

P = 0.25
"""Drop probability."""
DEGREES = Degrees(dp=2, tp=2, pp=2, sp=2)


def find_problems() -> Iterator[str]:
    """Yield a message for each failed check of dropout."""
    yield from _check_rates()
    yield from _check_attention(CausalProduct(P), "attention")
    yield from _check_passes()
    yield from _check_heads_of_ranks()
    yield from _check_ranks()
    yield from _check_recomputation()


def _model(dropout: float = P) -> GPT:
    config = small_config(dropout)
    model = GPT(config)
    init_weights(model, config, 1)
    return model


def _loss(model: GPT, number: int = 0) -> Tensor:
    return model(*micro_batches(number)[0])


def _check_rates() -> Iterator[str]:
    """Check the drop probability and the scale of every dropout module."""
    problems: list[str] = []
    model, called = _model(), set()
    torch.manual_seed(1)

    def compare(name: str, x: Tensor, y: Tensor) -> None:
        """Compare the input and output of a dropout module."""
        called.add(name)
        nonzero = x != 0
        problems.extend(_check_mask(name, (y != 0)[nonzero]))
        kept = nonzero & (y != 0)
        if not torch.allclose(y[kept], x[kept] / (1 - P), rtol=1e-6):
            problems.append(f"{name}: kept elements are not scaled by {1 / (1 - P):.4g}")

    drops = {name: module for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    for name, module in drops.items():
        module.register_forward_hook(lambda _, inputs, output, name=name: compare(name, inputs[0], output))
    _loss(model)
    yield from problems
    expected = 1 + 2 * model.config.n_layer
    if len(called) != expected:
        yield f"a model of {model.config.n_layer} layers has dropout in {len(called)} places, not {expected}"


def _check_mask(name: str, kept: Tensor) -> Iterator[str]:
    """Check the share of dropped elements, to six standard deviations: about one false alarm in 5e8 masks."""
    dropped, number = 1 - kept.float().mean().item(), kept.numel()
    if abs(dropped - P) > 6 * math.sqrt(P * (1 - P) / number):
        yield f"{name} drops {dropped:.3f} of {number} elements, not {P:g}"


def _check_attention(product: nn.Module, name: str) -> Iterator[str]:
    """Check the dropout of attention probabilities.

    With equal scores and the identity matrix as values, the output of attention is the probabilities.
    """
    torch.manual_seed(2)
    product.train()
    rows = _probabilities(product)
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    undropped = (1 / torch.arange(1, LENGTH + 1.0))[:, None].expand(LENGTH, LENGTH)
    kept = rows[..., visible] != 0
    yield from _check_mask(name, kept)
    scaled = (undropped[visible] / (1 - P)).expand_as(kept)
    if not torch.allclose(rows[..., visible][kept], scaled[kept], rtol=1e-5):
        yield f"{name}: kept probabilities are not scaled by {1 / (1 - P):.4g}"
    if rows[..., ~visible].any():
        yield f"{name} attends to later tokens"
    product.eval()
    if not torch.allclose(_probabilities(product), undropped * visible, rtol=1e-5):
        yield f"{name} applies dropout in evaluation mode"
    product.train()


def _probabilities(product: nn.Module) -> Tensor:
    zeros = torch.zeros(4, 2, LENGTH, LENGTH)
    return product(zeros, zeros, torch.eye(LENGTH).expand(4, 2, LENGTH, LENGTH))


def _check_passes() -> Iterator[str]:
    model, plain = _model(), _model(dropout=0.0)
    torch.manual_seed(3)
    if _loss(model).item() == _loss(model).item():
        yield "two forward passes have the same masks"
    model.eval()
    if _loss(model).item() != _loss(plain).item():
        yield "the loss of an evaluation differs from that of a model without dropout"


def _check_heads_of_ranks() -> Iterator[str]:
    """Check that tensor-parallel ranks draw different masks for their heads and keep equal generator states."""
    outputs, states = [], []
    for rank in (0, 1, 1):
        torch.manual_seed(4)
        product = RankedDropout(CausalProduct(P), rank)
        outputs.append(_probabilities(product.train()))
        states.append(torch.get_rng_state())
    if torch.equal(outputs[0], outputs[1]):
        yield "the heads of two tensor-parallel ranks have the same masks"
    if not torch.equal(outputs[1], outputs[2]) or not torch.equal(states[0], states[1]):
        yield "the random number generators of tensor-parallel ranks diverge"
    yield from _check_attention(RankedDropout(CausalProduct(P), 1), "attention of a tensor-parallel rank")


def _check_ranks() -> Iterator[str]:
    """Check that tensor-parallel peers have the same dropout seed, and other ranks have different ones."""
    world = range(DEGREES.dp * DEGREES.tp * DEGREES.pp * DEGREES.sp)

    def seed_of(rank: int) -> int:
        """Return the trainer's dropout seed of a rank, from a mesh without process groups."""
        def place(*axes: Any) -> tuple[int, int]:
            ranks = DEGREES.peers(rank, *axes)
            return ranks.index(rank), len(ranks)

        return dropout_seed(TrainConfig(), SimpleNamespace(rank=rank, mesh=SimpleNamespace(place=place)))

    seeds = [seed_of(rank) for rank in world]
    for rank, seed in enumerate(seeds):
        alike = {peer for peer in world if seeds[peer] == seed}
        if alike != (peers := set(DEGREES.peers(rank, "tp"))):
            yield (f"rank {rank} of {DEGREES} draws the masks of ranks {sorted(alike)}, but only its "
                   f"tensor-parallel peers {sorted(peers)} should share them")
            return


def _check_recomputation() -> Iterator[str]:
    """Check that recomputation leaves the loss and every gradient bitwise equal, with dropout."""
    outcomes: list[dict[str, Tensor | None]] = []
    for every in (0, 1):
        model = _model()
        recompute_blocks(model, every)
        passes: list[int] = []
        model.transformer["h"][0].attn.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        torch.manual_seed(5)
        loss = _loss(model)
        loss.backward()
        outcomes.append({"the loss": loss.detach(), **{f"the gradient of {name}": parameter.grad
                                                       for name, parameter in model.named_parameters()}})
        if len(passes) != 1 + every:
            yield f"with --recompute {every} a block is computed {len(passes)} times a step, not {1 + every}"
    for name, tensor in outcomes[0].items():
        if not torch.equal(tensor, outcomes[1][name]):
            yield f"{name} changes bitwise with recomputation"
            return
