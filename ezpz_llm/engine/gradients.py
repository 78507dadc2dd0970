"""Gradient norm, clipping, and the check of norm and loss that may skip the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ezpz_llm.base import UserError
from ezpz_llm.dist.mesh import Mesh
from ezpz_llm.dist.private_names import foreach_div_, foreach_norm
from ezpz_llm.engine.optimizer_state import EngineState, Slice
from ezpz_llm.model.parameters import decays, placement_of


def norm_and_clip(module: nn.Module, mesh: Mesh, optimizer: torch.optim.Optimizer, clip: float,
                  loss_scale: float = 1.0, masters: Mapping[nn.Parameter, Tensor] = MappingProxyType({})) -> Tensor:
    """Have the next step made on gradients without the loss scale, of a global norm of at most `clip` (0: any).

    For gradients that data-parallel ranks hold alike. Collective over the ranks that hold different parts of the
    model. What several of them hold counts once.

    Args:
        masters: of parameters that have one, the master weight, which has the gradient.

    Returns:
        The global 2-norm before clipping, without the loss scale, 0-d on the device, which is not waited for.
    """
    named = [(placement_of(name, parameter), masters.get(parameter, parameter).grad)
             for name, parameter in module.named_parameters()]
    grads = [grad for _, grad in named if grad is not None]
    mine = [grad for at, grad in named if grad is not None and at.primary]
    norm = torch.linalg.vector_norm(torch.stack(foreach_norm(mine)))
    if mesh.size("pp", "tp") > 1:
        square = norm.square()
        torch.distributed.all_reduce(square, group=mesh.group("pp", "tp"))
        norm = square.sqrt()
    norm = norm / loss_scale
    _scale(optimizer, grads, norm, clip, loss_scale)
    return norm


def divided_norm_and_clip(grads: list[Tensor], group: ProcessGroup, optimizer: torch.optim.Optimizer, clip: float,
                          loss_scale: float = 1.0) -> Tensor:
    """The same for gradients that are divided over the ranks of `group`. Collective over them."""
    square = torch.stack(foreach_norm(grads)).square().sum()
    if group.size() > 1:
        torch.distributed.all_reduce(square, group=group)
    norm = square.sqrt() / loss_scale
    _scale(optimizer, grads, norm, clip, loss_scale)
    return norm


def _scale(optimizer: torch.optim.Optimizer, grads: list[Tensor], norm: Tensor, clip: float,
           loss_scale: float) -> None:
    """torch's fused optimizers divide as they read, which spares a pass over all gradients; for others, divide."""
    divisor = None
    if clip > 0:
        # The same small term as torch.nn.utils.clip_grad_norm_ and DeepSpeed have.
        divisor = ((norm + 1e-6) / clip).clamp(min=1.0) * loss_scale
    elif loss_scale != 1.0:
        divisor = torch.full_like(norm, loss_scale)
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale = divisor
    elif divisor is not None:
        foreach_div_(grads, divisor)


# What stands between a gradient and the optimizer's step: a limit on its norm, and a look at both on some steps.
class NonFiniteStepSkipper:
    """Skips steps whose global gradient norm is NaN, Inf or above `limit`.

    Every rank has the same norm and the same limit, and so comes to the same answer without asking. Torch's fused
    optimizers get it on the device, by the flag that gradient scalers use, and nothing waits for it; for others it
    is read on CPU.

    A skipped step leaves parameters, moments and the optimizer's count of steps as they were.

    Attributes:
        limit: of the norm before clipping; infinity skips only NaN and Inf.
        norm: of the step that is about to be made, for engines that find it themselves.
        at_step: called once, before the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self.limit = math.inf
        self.norm: Tensor | None = None
        self.at_step: Callable[[], None] | None = None
        self._measuring: GroupNorms | None = None
        self._device = device
        self._ask: Callable[[], Tensor | float] | None = None
        self._aside: list[tuple[Tensor, Tensor]] = []

    def guard(self, optimizer: torch.optim.Optimizer, ask: Callable[[], Tensor | float] | None = None) -> None:
        """Stand before this optimizer's steps.

        Args:
            ask: gives the global gradient norm of the step that is about to be made, in place of `norm`.
        """
        self._ask = ask
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def measure(self, state: EngineState) -> None:
        """Measure the next step by decay group.

        Args:
            state: the engine's, not kept in files.
        """
        self._measuring = GroupNorms(state, self._device)

    def look(self) -> None:
        """Call `at_step`, if that was not done: where a step begins, at the latest before the optimizer's."""
        if self.at_step is not None:
            self.at_step()
            self.at_step = None

    def measured(self) -> GroupNorms | None:
        """What was found since `measure`, which ends here; None where nothing was asked for."""
        found, self._measuring = self._measuring, None
        if found is not None:
            found.close()
        return found

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.look()
        norm = self.norm if self._ask is None else self._ask()
        refused = ~(torch.as_tensor(norm, device=self._device) <= self.limit)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = refused.float()
        elif bool(refused):
            self._take_gradients(optimizer)
        if self._measuring is not None:
            self._measuring.before(optimizer)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside = []
        if self._measuring is not None:
            self._measuring.after()

    def _take_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """A parameter without a gradient is left alone by every optimizer."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._aside.append((parameter, parameter.grad))
                    parameter.grad = None


# Gradient, parameter and update norms of each decay group in one step, under every layout.
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
