"""Definition of a user's training for `ezpz-llm certify --target`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ezpz_llm.training.library.wrapped import Wrapped


@dataclass(frozen=True)
class Target:
    """Training to certify, returned by FUNCTION in `ezpz-llm certify --target FILE.py:FUNCTION`.

    A batch is a tensor, or a tuple, list or dict of tensors, possibly nested. The first dimension is samples.

    Attributes:
        module: () -> the module with its initial weights. Called several times, after `torch.manual_seed`.
        batch: (seed, number, dp_rank, dp_size) -> this rank's part of micro-batch `number`, from 0. All ranks'
            parts have the same size, and concatenated they are the batch of a single process (`dp_rank` 0 of 1).
        loss: (model, batch) -> the mean loss over the samples of the batch, 0-d. It calls `model` like a module.
        optimizer: (module) -> an optimizer with momentum for all parameters, such as Adam or SGD(momentum=0.9); by
            default AdamW.
        step: (model, micro_batches) -> the loss of a custom step, which computes a loss and calls `model.backward`
            and `model.step` for each micro-batch. `model` is the result of `ezpz_llm.wrap`.
        evaluate: (model, batch) -> the loss of this rank's part of a batch, without changing any state.
        tp_plan: plan for tensor-parallel layouts, as for `ezpz_llm.wrap`; by default the module's.
        epoch_batches: micro-batches in an epoch of `batch`. Training uses the first micro-batches of two epochs. By
            default an epoch contains exactly the micro-batches that are used.
    """

    module: Callable[[], nn.Module]
    batch: Callable[[int, int, int, int], Any]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    step: Callable[[Wrapped, list[Any]], Tensor | float] | None = None
    evaluate: Callable[[Wrapped, Any], Tensor | float] | None = None
    tp_plan: Mapping[str, str] | None = None
    epoch_batches: int | None = None
