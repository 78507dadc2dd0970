"""Norms of parameters, gradients, and updates by group of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ezpz_llm.core.base import UserError, shorten_value
from ezpz_llm.training.engine.gradients import ROW, tensor_norms
from ezpz_llm.training.engine.optimizer_state import EngineState, Slice
from ezpz_llm.training.model.config import decays

GROUPS = ("decayed", "others")
"""Decay groups: matrices and embeddings, which decay; biases and norms, which do not."""
KINDS = ("grad", "weight", "update")
_COPIED = 2 ** 28
"""Maximum number of weights that are copied to measure their updates: 1 GiB."""


class GroupNorms:
    """Gradient, weight and update norms by decay group, measured on this rank's elements during an optimizer step.

    The engine's state maps elements of the optimizer's tensors to parameters and to the rank that owns them, so an
    element counts once in the sum over all ranks, however it is sharded or replicated. Needs memory for a copy of
    the parameters that this rank steps (in DeepSpeed, of a group or sub-group at a time), after the backward pass
    has freed its activations.

    Attributes:
        sums: (3, 2), sums of squares over this rank's elements by KINDS and GROUPS. Gradients may be scaled by a
            common factor.
        lr: learning rate of each group in the step.
        elements: this rank's share of the stepped elements, by GROUPS.
        decays: weight decays of the stepped elements, by GROUPS.
        unknown_parameters: number of non-zero gradient elements in tensors that are not parameters of the model.
        gradients: names of this rank's pieces, and the norms of their gradients in the same order.
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
            pieces = self._by_storage.setdefault(piece.tensors["weight"].untyped_storage().data_ptr(), [])
            if piece.primary:
                pieces.append(piece)
        self._open: list[tuple[Slice, Tensor, Tensor]] = []
        self._spacing = 1

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure gradients and weights, and keep a copy of the weights."""
        gradients = [entry for group in optimizer.param_groups for parameter in group["params"]
                     if parameter.grad is not None for entry in self._pieces(parameter, group)]
        pieces = [piece for piece, _ in gradients]
        weights = [piece.tensors["weight"] for piece in pieces]
        self._add("grad", pieces, [gradient for _, gradient in gradients])
        self._add("weight", pieces, weights)
        self._spacing = -(-sum(weight.numel() for weight in weights) // _COPIED)
        rows = [_every(self._spacing, weight) for weight in weights]
        self._open = [(piece, part, part.clone()) for piece, part in zip(pieces, rows, strict=True)]

    def _pieces(self, parameter: Tensor, group: dict[str, Any]) -> Iterator[tuple[Slice, Tensor]]:
        """Yield the pieces in a tensor that the optimizer steps, each with its flat gradient."""
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
        """Measure the change of the weights."""
        for piece, weight, change in self._open:
            change.sub_(weight).mul_(math.sqrt(piece.numel / max(1, change.numel())))
        self._add("update", [piece for piece, _, _ in self._open], [change for _, _, change in self._open])
        self._open = []

    def close(self) -> None:
        """Release the engine's tensors."""
        self._by_storage = {}

    def describe(self, totals: list[list[float]], grad_norm: float | None) -> dict[str, float]:
        """Return the metrics of a step: learning rate, gradient norm and update ratio by group.

        Args:
            totals: sums of `sums` over all ranks.
            grad_norm: global gradient norm before clipping, to which the groups' norms are scaled; None if it is
                non-finite and the step was skipped.
        """
        gradients, weights, updates = totals
        whole = math.sqrt(sum(gradients))
        metrics = {f"lr_{group}": lr for group, lr in self.lr.items()}
        for group, gradient, weight, update in zip(GROUPS, gradients, weights, updates, strict=True):
            if grad_norm is not None and whole and math.isfinite(whole):
                metrics[f"grad_norm_{group}"] = math.sqrt(gradient) / whole * grad_norm
            if weight:
                metrics[f"update_ratio_{group}"] = math.sqrt(update / weight)
        return metrics

    def _add(self, kind: str, pieces: list[Slice], values: list[Tensor]) -> None:
        if not pieces:
            return
        norms = torch.stack(tensor_norms(values))
        if kind == "grad":
            self.gradients.append(([piece.name for piece in pieces], norms))
        squares = norms.square()
        shares = torch.zeros(len(pieces), len(GROUPS))
        for number, piece in enumerate(pieces):
            shares[number, GROUPS.index(_group(piece))] = 1 / piece.replicas
        self.sums[KINDS.index(kind)] += (squares @ shares.to(squares.device)).to(self.sums.device)


def _every(spacing: int, weight: Tensor) -> Tensor:
    """Return a view of every `spacing`-th row of ROW elements of a flat tensor.

    Return the whole tensor if it has no such row.
    """
    rows = weight[:weight.numel() // ROW * ROW].view(-1, ROW)[spacing // 2::spacing]
    return rows if spacing > 1 and rows.numel() else weight


def _slices(state: EngineState) -> Iterable[Slice]:
    if state.frozen:
        raise UserError("some parameters of the model are missing in the optimizer, so they would not be trained: "
                        f"{shorten_value(', '.join(state.frozen))}", where="the engine",
                        instead="report this bug with the run's layout.json", exit_code=1)
    return state.raw_slices()  # without fp32 copies of 8-bit moments, which would be kept until the step


def _group(piece: Slice) -> str:
    """Return the decay group, by the shape of the whole parameter, since a piece is flat."""
    return GROUPS[not decays(piece.shape)]
