"""Gradient norm, clipping, skipping of optimizer steps, and norms by decay group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ezpz_llm.core.base import UserError, shorten_value
from ezpz_llm.training.dist.mesh import Mesh
from ezpz_llm.training.dist.torch_internals import foreach_div_, foreach_norm, supports_grad_scale
from ezpz_llm.training.engine.optimizer_state import EngineState, Slice
from ezpz_llm.training.model.config import decays
from ezpz_llm.training.model.parameters import placement_of


def norm_and_clip(module: nn.Module, mesh: Mesh, optimizer: torch.optim.Optimizer, clip: float,
                  loss_scale: float = 1.0, masters: Mapping[nn.Parameter, Tensor] = MappingProxyType({})) -> Tensor:
    """Clip gradients to a global norm of `clip` (0 disables clipping) for the next step, and undo the loss scale.

    Gradients must be equal on data-parallel ranks. Collective over the ranks with different parts of the model.
    Gradients that are replicated over these ranks count once.

    Args:
        masters: master weights, which hold the gradients of their parameters.

    Returns:
        The global 2-norm before clipping, without the loss scale, 0-d on the device, without synchronization.
    """
    named = [(placement_of(name, parameter), masters.get(parameter, parameter).grad)
             for name, parameter in module.named_parameters()]
    grads = [grad for _, grad in named if grad is not None]
    owned = [grad for at, grad in named if grad is not None and at.primary]
    norm = _total_norm(owned, next(module.parameters()).device)
    if mesh.size("pp", "tp") > 1:
        square = norm.square()
        torch.distributed.all_reduce(square, group=mesh.group("pp", "tp"))
        norm = square.sqrt()
    norm = norm / loss_scale
    _scale_gradients(optimizer, grads, norm, clip, loss_scale)
    return norm


def sharded_norm_and_clip(grads: list[Tensor], device: torch.device, group: ProcessGroup,
                          optimizer: torch.optim.Optimizer, clip: float, loss_scale: float = 1.0) -> Tensor:
    """Clip gradients that are sharded over `group`, as `norm_and_clip` does. Collective over the group."""
    square = _total_norm(grads, device).square()
    if group.size() > 1:
        torch.distributed.all_reduce(square, group=group)
    norm = square.sqrt() / loss_scale
    _scale_gradients(optimizer, grads, norm, clip, loss_scale)
    return norm


def _total_norm(grads: list[Tensor], device: torch.device) -> Tensor:
    """Return the norm of all gradients on this rank, 0-d; 0 if there are none."""
    return torch.linalg.vector_norm(torch.stack(tensor_norms(grads))) if grads else torch.zeros((), device=device)


_ROW = 4096
"""Elements per row in `tensor_norms`. In fp32, the error of a row's norm is about one rounding."""


def tensor_norms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor (0-d).

    On CPU, torch adds a tensor's fp32 squares one after another, so that the norm of 4e7 elements is 0.3 % too
    small. Therefore this function first computes the norms of rows.
    """
    return list(foreach_norm([_row_norms(tensor) if tensor.device.type == "cpu" and tensor.dtype == torch.float32
                              and tensor.numel() > 2 * _ROW else tensor for tensor in tensors]))


def _row_norms(tensor: Tensor) -> Tensor:
    """Return a 1-D tensor with the same norm: the norms of all full rows, and the remaining elements."""
    flat = tensor.reshape(-1)
    rows = flat[:flat.numel() // _ROW * _ROW].view(-1, _ROW)
    return torch.cat([torch.linalg.vector_norm(rows, dim=1), flat[rows.numel():]])


def _scale_gradients(optimizer: torch.optim.Optimizer, grads: list[Tensor], norm: Tensor, clip: float,
                     loss_scale: float) -> None:
    """Divide gradients by the loss scale and by the factor that clips them to `clip`.

    torch's fused optimizers divide during the step, which saves a pass over all gradients.
    """
    divisor = None
    if clip > 0:
        # The same small term as in torch.nn.utils.clip_grad_norm_ and DeepSpeed.
        divisor = ((norm + 1e-6) / clip).clamp(min=1.0) * loss_scale
    elif loss_scale != 1.0:
        divisor = torch.full_like(norm, loss_scale)
    if supports_grad_scale(optimizer):
        optimizer.grad_scale = divisor
    elif divisor is not None:
        foreach_div_(grads, divisor)


class NonFiniteStepSkipper:
    """Hook that skips steps whose global gradient norm is NaN, Inf or above `limit`.

    All ranks have the same norm and limit, so they decide without communication. torch's fused optimizers read the
    decision on the device, from the flag for gradient scalers, without synchronization. For other optimizers, the
    CPU reads it.

    A skipped step changes neither parameters, nor moments, nor the optimizer's step count.

    Attributes:
        limit: limit of the norm before clipping; infinity skips only NaN and Inf.
        norm: norm of the next step, for engines that compute it themselves.
        at_step: called once, before the next step.
        last_measured: latest result of `measured`.
    """

    def __init__(self, device: torch.device) -> None:
        self.limit = math.inf
        self.norm: Tensor | None = None
        self.at_step: Callable[[], None] | None = None
        self.last_measured: GroupNorms | None = None
        self._measuring: GroupNorms | None = None
        self._device = device
        self._get_norm: Callable[[], Tensor | float] | None = None
        self._removed: list[tuple[Tensor, Tensor]] = []

    def guard(self, optimizer: torch.optim.Optimizer, get_norm: Callable[[], Tensor | float] | None = None) -> None:
        """Install the hooks in an optimizer.

        Args:
            get_norm: returns the global gradient norm of the next step; default: `norm`.
        """
        self._get_norm = get_norm
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def measure(self, state: EngineState) -> None:
        """Measure norms by decay group in the next step.

        Args:
            state: the engine's state, which must not be offloaded to files.
        """
        self._measuring = GroupNorms(state, self._device)

    def call_at_step(self) -> None:
        """Call `at_step` if pending; engines call this at the start of a step or before the optimizer step."""
        if self.at_step is not None:
            self.at_step()
            self.at_step = None

    def measured(self) -> GroupNorms | None:
        """Return the norms since `measure`, and stop measuring; None if `measure` was not called."""
        norms, self._measuring = self._measuring, None
        if norms is not None:
            norms.close()
        self.last_measured = norms
        return norms

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.call_at_step()
        norm = self.norm if self._get_norm is None else self._get_norm()
        # Not `norm > limit`, which is false for NaN; without a limit, only a finite norm passes.
        skip = ~(torch.as_tensor(norm, device=self._device) <= min(self.limit, torch.finfo(torch.float32).max))
        if supports_grad_scale(optimizer):
            optimizer.found_inf = skip.float()
        elif bool(skip):
            self._remove_gradients(optimizer)
        if self._measuring is not None:
            self._measuring.before(optimizer)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._removed:
            parameter.grad = gradient
        self._removed = []
        if self._measuring is not None:
            self._measuring.after()

    def _remove_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove all gradients until `_after`, because optimizers ignore parameters without a gradient."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._removed.append((parameter, parameter.grad))
                    parameter.grad = None


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
    """Return a view of every `spacing`-th row of _ROW elements of a flat tensor.

    Return the whole tensor if it has no such row.
    """
    rows = weight[:weight.numel() // _ROW * _ROW].view(-1, _ROW)[spacing // 2::spacing]
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
