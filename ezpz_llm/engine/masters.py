"""fp32 master weights of a model whose parameters have two bytes; their gradients are added and reduced in fp32
unless bf16 is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ezpz_llm.dist.private_names import foreach_copy_
from ezpz_llm.engine.precision import parameter_dtype
from ezpz_llm.model.init import defer_values, take_values

_BUCKET = 2 ** 23
"""Elements that are reduced at once, at most: 32 MiB. A larger parameter is a bucket by itself."""


def round_parameters(model: nn.Module, precision: str) -> None:
    """Round every parameter to what `precision` computes with, or the values that a model on the meta device waits
    for; its dtype and its storage stay.

    So that master weights begin equal to the parameters in every engine, DeepSpeed's among them, which makes its
    own from rounded parameters.
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
    """Of each parameter of a model its fp32 master weight, which the optimizer steps in the parameter's place.

    A backward pass's gradients are added in fp32 to those of the masters, each as soon as it is there, and dropped.
    Over the ranks of a group they are averaged in buckets while the backward pass goes on.

    `reduces` tells the next backward pass that it is the last before a step.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, group: ProcessGroup | None, peers: int,
                 reduced: torch.dtype = torch.float32) -> None:
        """Round the model's fp32 parameters to `dtype` and keep what they were.

        Args:
            group: of the ranks with the same parameters, `peers` in number; None for the whole world, as in torch.
            reduced: what gradients travel in.
        """
        parameters = list(dict.fromkeys(model.parameters()))
        self._masters = {parameter: parameter.detach().clone() for parameter in parameters}
        self._group, self._share = group, 1.0 / peers
        self.reduces = True
        # A backward pass makes the gradients of a model's last layers first.
        self._buckets = list(_buckets(reversed(parameters), self._masters, reduced))
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._first = self._next = 0 if peers > 1 else len(self._buckets)
        for parameter in parameters:
            parameter.data = parameter.data.to(dtype)
            parameter.register_post_accumulate_grad_hook(self._take)

    def __getitem__(self, parameter: nn.Parameter) -> Tensor:
        return self._masters[parameter]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._masters)

    def __len__(self) -> int:
        return len(self._masters)

    def groups(self, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Optimizer groups of the masters, from those of the parameters."""
        return [{**group, "params": [self[parameter] for parameter in group["params"]]} for group in groups]

    def finish_reduction(self) -> None:
        """Wait until every gradient is the mean over the ranks, also of parameters that no loss reached."""
        self._reduce(len(self._buckets))
        for bucket in self._buckets:
            bucket.wait()
        self._next = self._first

    def zero_gradients(self) -> None:
        """Forget the gradients."""
        for bucket in self._buckets:
            bucket.gradients.zero_()

    def round(self) -> None:
        """Make the parameters the rounded masters, after a step or a load."""
        with torch.no_grad():
            foreach_copy_(list(self._masters), list(self._masters.values()))

    def _take(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        total, gradient = self._masters[parameter].grad, parameter.grad
        assert total is not None
        assert gradient is not None
        total.add_(gradient, alpha=self._share)
        parameter.grad = None
        if self.reduces:
            self._bucket_of[parameter].missing -= 1
            ready = self._next
            while ready < len(self._buckets) and not self._buckets[ready].missing:
                ready += 1
            self._reduce(ready)

    def _reduce(self, end: int) -> None:
        """Reduce the buckets up to `end`, in the one order that all ranks keep."""
        for bucket in self._buckets[self._next:end]:
            bucket.reduce(self._group)
        self._next = max(self._next, end)


class _Bucket:
    """Neighbouring gradients in one flat fp32 tensor. `missing` of them are not yet there in this backward pass."""

    def __init__(self, parameters: list[nn.Parameter], masters: Mapping[nn.Parameter, Tensor],
                 reduced: torch.dtype) -> None:
        self.parameters, self.missing = parameters, len(parameters)
        self._reduced = reduced
        self._work: tuple[torch.distributed.Work, Tensor] | None = None
        sizes = [parameter.numel() for parameter in parameters]
        self.gradients = torch.zeros(sum(sizes), device=parameters[0].device)
        for parameter, flat in zip(parameters, self.gradients.split(sizes), strict=True):
            masters[parameter].grad = flat.view(parameter.shape)

    def reduce(self, group: ProcessGroup | None) -> None:
        """Begin to add it up over the ranks of a group."""
        travelling = self.gradients.to(self._reduced)
        work = torch.distributed.all_reduce(travelling, group=group, async_op=True)
        self._work = work, travelling

    def wait(self) -> None:
        """Until it is reduced, if it is being reduced; then nothing of it is there for the next step."""
        if self._work is not None:
            work, travelling = self._work
            work.wait()
            if travelling is not self.gradients:
                self.gradients.copy_(travelling)
        self._work, self.missing = None, len(self.parameters)


def _buckets(parameters: Iterable[nn.Parameter], masters: Mapping[nn.Parameter, Tensor],
             reduced: torch.dtype) -> Iterator[_Bucket]:
    together: list[nn.Parameter] = []
    for parameter in parameters:
        if together and sum(one.numel() for one in together) + parameter.numel() > _BUCKET:
            yield _Bucket(together, masters, reduced)
            together = []
        together.append(parameter)
    if together:
        yield _Bucket(together, masters, reduced)
