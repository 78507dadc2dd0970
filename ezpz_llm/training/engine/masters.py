"""fp32 master weights for 16-bit parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm.training.dist.torch_internals import foreach_copy_
from ezpz_llm.training.engine.precision import parameter_dtype
from ezpz_llm.training.model.init import defer_values, take_values


def round_parameters(model: nn.Module, precision: str) -> None:
    """Round every parameter, or its deferred initial value, to the parameter dtype of `precision`.

    The dtype and storage of the parameters do not change. So initial master weights equal the parameters in every
    engine, including DeepSpeed's, which copies master weights from rounded parameters.
    """
    dtype = parameter_dtype(precision)
    if dtype == torch.float32:
        return
    if (values := take_values(model)) is not None:
        defer_values(model, lambda name, box: values(name, box).to(dtype).float())
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))


class MasterWeights(Mapping[nn.Parameter, Tensor]):
    """Mapping of a model's trained parameters to fp32 master weights, which the optimizer steps instead."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Copy the model's fp32 parameters to master weights, and cast the parameters to `dtype`."""
        self._masters = {parameter: parameter.detach().clone() for parameter in model.parameters()
                         if parameter.requires_grad}
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)

    def __getitem__(self, parameter: nn.Parameter) -> Tensor:
        return self._masters[parameter]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._masters)

    def __len__(self) -> int:
        return len(self._masters)

    def groups(self, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return optimizer groups of the master weights, given the parameters' groups."""
        return [{**group, "params": [self[parameter] for parameter in group["params"]]} for group in groups]

    def round(self) -> None:
        """Copy the rounded master weights to the parameters, after a step or a load."""
        with torch.no_grad():
            foreach_copy_(list(self._masters), list(self._masters.values()))
