"""A training of one's own as `ezpz-llm certify --target` wants it: the parts that it puts together anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ezpz_llm.library.wrapping import Wrapped


@dataclass(frozen=True)
class Target:
    """What a function of FILE.py gives to `ezpz-llm certify --target FILE.py:FUNCTION`.

    A batch is what you like: a tensor, or tuples, lists and dicts of them. The first dimension counts samples.

    Attributes:
        module: makes the module with its initial weights; called after `torch.manual_seed`, often.
        batch: (seed, number, dp_rank, dp_size) -> this rank's part of micro batch `number`, from 0 on. The parts of
            all ranks are equally large, and together the one of a single process, `dp_rank` 0 of 1.
        loss: (model, batch) -> the mean loss over the batch's samples, 0-d. It calls `model` as one calls a module.
        optimizer: (module) -> torch's AdamW or Adam of all of its parameters; by default an AdamW.
        step: (model, micro_batches) -> the loss of a step, one's own: for each micro batch a loss,
            `model.backward` and `model.step`. `model` is what `ezpz_llm.wrap` gives.
        evaluate: (model, batch) -> the loss of this rank's part of a batch, and nothing that was there is changed.
        tp_plan: for tensor-parallel layouts, as `ezpz_llm.wrap` takes it; by default the module's own.
        epoch_batches: micro batches of an epoch of `batch`: the first ones of two epochs are trained on. By default
            an epoch has as many as are taken of it.
    """

    module: Callable[[], nn.Module]
    batch: Callable[[int, int, int, int], Any]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    step: Callable[[Wrapped, list[Any]], Tensor | float] | None = None
    evaluate: Callable[[Wrapped, Any], Tensor | float] | None = None
    tp_plan: Mapping[str, str] | None = None
    epoch_batches: int | None = None
