"""Dropout and recomputation, held to their definition.

Each element is dropped with the same probability p, kept ones are 1/(1 - p) times as large; every pass has masks of
its own, an evaluation none. Tensor-parallel peers draw alike where they hold the same activations and each its own
where they hold different heads; all other ranks draw differently. A block that is computed again in the backward
pass has the masks of the first time, and all gradients their bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm.certify.loss_scaling import LENGTH, micro_batches, small_config
from ezpz_llm.dist import Degrees
from ezpz_llm.model.compile import recompute_blocks
from ezpz_llm.model.gpt import GPT, CausalProduct
from ezpz_llm.model.init import init_weights
from ezpz_llm.model.tensor_parallel import RankedDropout
from ezpz_llm.trainer.config import TrainConfig
from ezpz_llm.trainer.run import dropout_seed

P = 0.25
DEGREES = Degrees(dp=2, tp=2, pp=2, sp=2)


def complaints() -> Iterator[str]:
    """What is wrong with dropout."""
    yield from _of_rates()
    yield from _of_attention(CausalProduct(P), "attention")
    yield from _of_passes()
    yield from _of_heads_of_ranks()
    yield from _of_ranks()
    yield from _of_recomputation()


def _model(dropout: float = P) -> GPT:
    config = small_config(dropout)
    model = GPT(config)
    init_weights(model, config, 1)
    return model


def _loss(model: GPT, number: int = 0) -> Tensor:
    return model(*micro_batches(number)[0])


def _of_rates() -> Iterator[str]:
    """Every dropout of the model drops its share, and scales what it keeps."""
    wrong: list[str] = []
    model, called = _model(), set()
    torch.manual_seed(1)

    def look(name: str, given: Tensor, got: Tensor) -> None:
        """Compare what a dropout was given and what it gave."""
        called.add(name)
        there = given != 0
        wrong.extend(_of_mask(name, (got != 0)[there]))
        kept = there & (got != 0)
        if not torch.allclose(got[kept], given[kept] / (1 - P), rtol=1e-6):
            wrong.append(f"{name}: what is kept is not {1 / (1 - P):.4g} times as large")

    drops = {name: module for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    for name, module in drops.items():
        module.register_forward_hook(lambda _, inputs, output, name=name: look(name, inputs[0], output))
    _loss(model)
    yield from wrong
    expected = 1 + 2 * model.config.n_layer
    if len(called) != expected:
        yield f"a model of {model.config.n_layer} layers has dropout in {len(called)} places, not {expected}"


def _of_mask(name: str, kept: Tensor) -> Iterator[str]:
    """Six standard deviations of the number that is dropped: once in 5e8 masks."""
    dropped, number = 1 - kept.float().mean().item(), kept.numel()
    if abs(dropped - P) > 6 * math.sqrt(P * (1 - P) / number):
        yield f"{name} drops {dropped:.3f} of {number} elements, not {P:g}"


def _of_attention(product: nn.Module, name: str) -> Iterator[str]:
    """Equal scores and the unit matrix as values show the probabilities themselves."""
    torch.manual_seed(2)
    product.train()
    rows = _probabilities(product)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    whole = (1 / torch.arange(1, LENGTH + 1.0))[:, None].expand(LENGTH, LENGTH)
    kept = rows[..., seen] != 0
    yield from _of_mask(name, kept)
    if not torch.allclose(rows[..., seen][kept], (whole[seen] / (1 - P)).expand_as(kept)[kept], rtol=1e-5):
        yield f"{name}: probabilities that are kept are not {1 / (1 - P):.4g} times as large"
    if rows[..., ~seen].any():
        yield f"{name} sees what follows"
    product.eval()
    if not torch.allclose(_probabilities(product), whole * seen, rtol=1e-5):
        yield f"{name} has dropout in evaluation mode"
    product.train()


def _probabilities(product: nn.Module) -> Tensor:
    zeros = torch.zeros(4, 2, LENGTH, LENGTH)
    return product(zeros, zeros, torch.eye(LENGTH).expand(4, 2, LENGTH, LENGTH))


def _of_passes() -> Iterator[str]:
    model, plain = _model(), _model(dropout=0.0)
    torch.manual_seed(3)
    if _loss(model).item() == _loss(model).item():
        yield "two passes of one batch have the same masks"
    model.eval()
    if _loss(model).item() != _loss(plain).item():
        yield "an evaluation has another loss than a model without dropout"


def _of_heads_of_ranks() -> Iterator[str]:
    """Attention of tensor-parallel ranks, whose generators are alike, and stay so."""
    found, states = [], []
    for rank in (0, 1, 1):
        torch.manual_seed(4)
        product = RankedDropout(CausalProduct(P), rank)
        found.append(_probabilities(product.train()))
        states.append(torch.get_rng_state())
    if torch.equal(found[0], found[1]):
        yield "the heads of two tensor-parallel ranks have the same masks"
    if not torch.equal(found[1], found[2]) or not torch.equal(states[0], states[1]):
        yield "the random numbers of tensor-parallel ranks do not stay alike"
    yield from _of_attention(RankedDropout(CausalProduct(P), 1), "attention of a tensor-parallel rank")


def _of_ranks() -> Iterator[str]:
    """Peers, which hold the same activations, draw alike, and no other ranks."""
    world = range(DEGREES.dp * DEGREES.tp * DEGREES.pp * DEGREES.sp)

    def seed_of(rank: int) -> int:
        """The trainer's, of a rank in a mesh that has no process groups."""
        def place(*axes: Any) -> tuple[int, int]:
            ranks = DEGREES.peers(rank, *axes)
            return ranks.index(rank), len(ranks)

        return dropout_seed(TrainConfig(), SimpleNamespace(rank=rank, mesh=SimpleNamespace(place=place)))

    seeds = [seed_of(rank) for rank in world]
    for rank, seed in enumerate(seeds):
        alike = {other for other in world if seeds[other] == seed}
        if alike != (peers := set(DEGREES.peers(rank, "tp"))):
            yield (f"rank {rank} of {DEGREES} draws the masks of ranks {sorted(alike)}, not those of its "
                   f"tensor-parallel peers {sorted(peers)} alone")
            return


def _of_recomputation() -> Iterator[str]:
    """The loss and every gradient have the same bits with it and without, dropout included."""
    found: list[dict[str, Tensor | None]] = []
    for every in (0, 1):
        model = _model()
        recompute_blocks(model, every)
        passes: list[int] = []
        model.transformer["h"][0].attn.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        torch.manual_seed(5)
        loss = _loss(model)
        loss.backward()
        found.append({"the loss": loss.detach(), **{f"the gradient of {name}": one.grad
                                                    for name, one in model.named_parameters()}})
        if len(passes) != 1 + every:
            yield f"with --recompute {every} a block is computed {len(passes)} times a step, not {1 + every}"
    for what, one in found[0].items():
        if not torch.equal(one, found[1][what]):
            yield f"{what} is not the same bits where blocks are computed again"
            return
