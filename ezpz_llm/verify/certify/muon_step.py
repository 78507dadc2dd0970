"""Checks of Muon's steps against their definition, in fp64, and of functions of matrices sharded over ranks.

The gradients are those that the optimizer gets. Matrices of blocks follow Muon: Nesterov's momentum, five
Newton-Schulz iterations, and a factor of 0.2 sqrt(max(rows, columns)). All other parameters follow AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ezpz_llm.training.dist import Degrees
from ezpz_llm.training.engine.optimizer_state import Slice
from ezpz_llm.training.engine.whole_matrices import WholeMatrices
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.parameters import whole_box
from ezpz_llm.verify.certify import plain_step, recipe
from ezpz_llm.verify.certify.loss_scaling import ACCUMULATION, BATCH, micro_batches, single_cpu_rank, small_config
from ezpz_llm.verify.certify.one_process import settings_of
from ezpz_llm.verify.certify.reference import make_engine
from ezpz_llm.verify.certify.thread_ranks import ThreadMesh, run_ranks

STEPS, _MOMENTUM = 3, 0.95
TOLERANCE, ROUNDING = 1e-4, STEPS * 2.0 ** -24
"""Error of weights relative to their change in a step, and relative to the weights."""


def find_problems() -> Iterator[str]:
    """Yield a message for each parameter, or matrix over ranks, that differs from the definition."""
    yield from _check_steps()
    yield from _check_sharded_matrices()


def _check_steps() -> Iterator[str]:
    config = small_config()
    gradients: dict[str, Tensor] = {}
    with single_cpu_rank() as single:
        resolved = resolve(Request("ddp", world_size=1, global_batch=BATCH, accumulation=ACCUMULATION,
                                   clip=recipe.CLIP, precision="fp32", device="cpu", optimizer="muon"))
        engine = make_engine(config, resolved, single)
        named = dict(engine.module.named_parameters())
        engine.training_state().optimizer.register_step_pre_hook(lambda *_: gradients.update(
            {name: parameter.grad.double() for name, parameter in named.items()}))
        expected = plain_step.initial_state({name: value.detach().double() for name, value in named.items()})
        settings = settings_of(config, recipe.CLIP)
        for step in range(STEPS):
            before, rate = expected.weights, recipe.learning_rate(step, STEPS)
            engine.train_step(micro_batches(step), rate, lambda phase: nullcontext())
            momenta = {name: value + (1 - _MOMENTUM) * (gradients[name] - value)
                       for name, value in expected.first.items() if _is_block_matrix(name, value)}
            moved = {name: before[name] * (1 - rate * recipe.WEIGHT_DECAY)
                     - rate * _orthogonalize(gradients[name] + _MOMENTUM * (momentum - gradients[name]))
                     for name, momentum in momenta.items()}
            expected = plain_step.apply_adamw(expected, gradients, rate, settings)
            expected = replace(expected, weights={**expected.weights, **moved}, first={**expected.first, **momenta})
            for name, value in expected.weights.items():
                error = (named[name].detach() - value).norm().item()
                bound = TOLERANCE * (value - before[name]).norm().item() + ROUNDING * value.norm().item()
                if not error <= bound:
                    yield f"Muon, step {step + 1}: {name} differs by {error:.2g}, allowed {bound:.2g}"


def _is_block_matrix(name: str, value: Tensor) -> bool:
    return name.startswith("transformer.h.") and value.dim() == 2


def _orthogonalize(matrix: Tensor) -> Tensor:
    """Scale the singular values s by five iterations of 3.4445 s - 4.775 s^3 + 2.0315 s^5, from a unit norm.

    Jordan et al. 2024, kellerjordan.github.io/posts/muon. The last factor: Liu et al. 2025, arXiv:2502.16982.
    """
    u, s, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s ** 3 + 2.0315 * s ** 5
    return 0.2 * max(matrix.shape) ** 0.5 * (u * s) @ v


def _check_sharded_matrices() -> Iterator[str]:
    """Check a function of two matrices in one flat tensor, which is divided over ranks as ZeRO does."""
    shapes, offsets, length = {"a": (5, 4), "b": (3, 7)}, {"a": 0, "b": 20}, 41
    flat = torch.randn(length, generator=torch.Generator().manual_seed(0))

    def apply_on_rank(mesh: ThreadMesh) -> Tensor:
        """Return this rank's elements of the results."""
        share = -(-length // mesh.dp_size)
        begin = mesh.dp_rank * share
        local = flat[begin:begin + share].clone()
        pieces = []
        for name, shape in shapes.items():
            start, stop = (min(max(edge - offsets[name], 0), math.prod(shape)) for edge in (begin, begin + share))
            if start < stop:
                place = offsets[name] + start - begin
                pieces.append(Slice(name, shape, whole_box(shape), start, stop,
                                    {"weight": local[place:place + stop - start]}))
        state: Any = SimpleNamespace(shapes=shapes, raw_slices=lambda: pieces,
                                     stepped=lambda: [(local, list(shapes))])
        WholeMatrices(state, mesh, shapes).apply(lambda matrix: matrix @ matrix.T @ matrix, {local: local})
        return local

    matrices = [part.view(shape) for part, shape in zip(flat.split((20, 21)), shapes.values(), strict=True)]
    expected = torch.cat([(matrix @ matrix.T @ matrix).flatten() for matrix in matrices])
    for ranks in (2, 3):
        actual = torch.cat(run_ranks(Degrees(dp=ranks), apply_on_rank, "a function of sharded matrices"))
        if not torch.allclose(actual, expected, rtol=1e-5, atol=1e-5):
            yield f"a function of matrices over {ranks} ranks differs from that of whole matrices"
