"""Backward passes that compute gradients of one model, although the loss may depend on others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm.core.base import UserError


def leaves(loss: Tensor) -> list[Tensor]:
    """Return the tensors that a backward pass from the loss computes gradients of.

    Parameters of reentrant checkpoints are not among them.
    """
    found, seen, nodes = [], set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of a node that accumulates a gradient
        if leaf is not None:
            found.append(leaf)
        nodes += [following for following, _ in node.next_functions]
    return found


def restricted(loss: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """Return the loss as a tensor whose backward pass computes gradients of `inputs` only."""
    return loss.as_subclass(type("Loss", (_Loss,), {"inputs": list(inputs)}))


class _Loss(Tensor):
    """Loss whose backward pass computes gradients of `inputs` only. Results of operations are losses, too."""

    inputs: list[Tensor]

    def backward(self, gradient: Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False,
                 inputs: Any = None) -> None:
        """Compute the gradients of `inputs`; see `torch.Tensor.backward`."""
        try:
            torch.autograd.backward(self.as_subclass(Tensor), gradient, retain_graph, create_graph,
                                    inputs=self.inputs)
        except RuntimeError as error:
            if "compatible with .grad()" not in str(error):
                raise
            raise UserError("reentrant gradient checkpointing with several wrapped models",
                            where="Wrapped.backward",
                            instead="use_reentrant=False in torch.utils.checkpoint") from error


@contextmanager
def kept_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Keep gradients as they are, and discard those of the backward pass in this context."""
    kept = {parameter: parameter.grad for parameter in parameters}
    for parameter in kept:
        parameter.grad = None
    yield
    for parameter, gradient in kept.items():
        parameter.grad = gradient
