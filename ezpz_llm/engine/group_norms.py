"""Gradient, parameter and update norms of each decay group in one step, under every layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ezpz_llm.base.errors import UserError
from ezpz_llm.dist.private_names import foreach_norm
from ezpz_llm.engine.optimizer_state import EngineState, Slice
from ezpz_llm.model.parameters import decays

GROUPS = ("decayed", "others")
"""Matrices and embeddings, which decay; biases and norms, which do not."""
KINDS = ("grad", "weight", "update")


class GroupNorms:
    """Squared norms of what this rank holds, found while the optimizer steps.

    The engine's state says which elements of the optimizer's tensors are which parameter's, and which rank answers
    for them: an element counts once in the sum over all ranks, whatever divides or repeats it. Costs a copy of the
    parameters that this rank steps (at once, by DeepSpeed's group or sub-group), after the backward pass has given
    back its activations.

    `sums` (3, 2), the sums over this rank's elements by KINDS and GROUPS, and `lr`, the learning rate of each
    group as the optimizer had it, are there after the step. Gradients may have been scaled, by one number for all.
    `elements` and `decays` are this rank's share of the elements that were stepped, and their weight decays, by
    GROUPS. `unknown_parameters` counts gradients, other than 0, that the optimizer has of what is no parameter of
    the model. `gradients` are the norms of this rank's pieces, in the order of the names beside them.
    """

    def __init__(self, state: EngineState, device: torch.device) -> None:
        self.sums = torch.zeros(len(KINDS), len(GROUPS), device=device)
        self.lr: dict[str, float] = {}
        self.elements = [0.0, 0.0]
        self.decays: list[set[float]] = [set(), set()]
        self.unknown_parameters = torch.zeros((), device=device)
        self.gradients: list[tuple[list[str], Tensor]] = []
        self._by_storage: dict[int, list[Slice]] = {}
        for piece in _slices(state):
            found = self._by_storage.setdefault(piece.tensors["weight"].untyped_storage().data_ptr(), [])
            if piece.primary:
                found.append(piece)
        self._open: list[tuple[Slice, Tensor, Tensor]] = []

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at gradients and weights, and keep the weights."""
        gradients = [found for group in optimizer.param_groups for parameter in group["params"]
                     if parameter.grad is not None for found in self._pieces(parameter, group)]
        pieces = [piece for piece, _ in gradients]
        weights = [piece.tensors["weight"] for piece in pieces]
        self._add("grad", pieces, [gradient for _, gradient in gradients])
        self._add("weight", pieces, weights)
        self._open = [(piece, weight, weight.clone()) for piece, weight in zip(pieces, weights, strict=True)]

    def _pieces(self, parameter: Tensor, group: dict[str, Any]) -> Iterator[tuple[Slice, Tensor]]:
        """What lies in a tensor that the optimizer steps: each piece with its gradient, flat."""
        gradient = parameter.grad.reshape(-1)
        pieces = self._by_storage.get(parameter.untyped_storage().data_ptr())
        if pieces is None:
            self.unknown_parameters += gradient.count_nonzero().to(self.unknown_parameters.device)
        for piece in pieces or ():
            offset = piece.tensors["weight"].storage_offset() - parameter.storage_offset()
            if 0 <= offset < parameter.numel():
                number = GROUPS.index(_group(piece))
                self.lr[_group(piece)] = float(group["lr"])
                self.elements[number] += piece.numel / piece.replicas
                self.decays[number].add(float(group["weight_decay"]))
                yield piece, gradient[offset:offset + piece.numel]

    def after(self) -> None:
        """Look at the weights again."""
        for _, weight, old in self._open:
            old.sub_(weight)
        self._add("update", [piece for piece, _, _ in self._open], [change for _, _, change in self._open])
        self._open = []

    def close(self) -> None:
        """Let go of the engine's tensors."""
        self._by_storage = {}

    def describe(self, totals: list[list[float]], grad_norm: float | None) -> dict[str, float]:
        """What a log line says of a step.

        Args:
            totals: `sums` over all ranks.
            grad_norm: the global norm before clipping, which the groups' norms before clipping add up to; None
                where it is NaN or Inf, and nothing was changed.
        """
        gradients, weights, updates = totals
        whole = math.sqrt(sum(gradients))
        found = {f"lr_{group}": lr for group, lr in self.lr.items()}
        for group, gradient, weight, update in zip(GROUPS, gradients, weights, updates, strict=True):
            if grad_norm is not None and whole and math.isfinite(whole):
                found[f"grad_norm_{group}"] = math.sqrt(gradient) / whole * grad_norm
            if weight:
                found[f"update_ratio_{group}"] = math.sqrt(update / weight)
        return found

    def _add(self, kind: str, pieces: list[Slice], values: list[Tensor]) -> None:
        if not pieces:
            return
        norms = torch.stack(foreach_norm(values))
        if kind == "grad":
            self.gradients.append(([piece.name for piece in pieces], norms))
        squares = norms.square()
        shares = torch.zeros(len(pieces), len(GROUPS))
        for number, piece in enumerate(pieces):
            shares[number, GROUPS.index(_group(piece))] = 1 / piece.replicas
        self.sums[KINDS.index(kind)] += (squares @ shares.to(squares.device)).to(self.sums.device)


def _slices(state: EngineState) -> Iterator[Slice]:
    try:
        yield from state.slices()
    except KeyError as error:
        raise UserError("the optimizer does not hold all of the model's parameters", where="the engine",
                        instead="please report this with layout.json: such a run learns nothing",
                        exit_code=1) from error


def _group(piece: Slice) -> str:
    """By the whole parameter's dimensions: what a rank steps may be flat."""
    return GROUPS[not decays(piece.shape)]
