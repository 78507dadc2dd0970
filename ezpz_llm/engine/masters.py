"""fp32 master weights for 16-bit parameters; gradients are accumulated in fp32, and reduced in fp32 or bf16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ezpz_llm.base import UserError
from ezpz_llm.dist.private_names import foreach_copy_, foreach_mul_
from ezpz_llm.engine.precision import parameter_dtype
from ezpz_llm.model.init import defer_values, take_values

_BUCKET = 2 ** 23
"""Maximum number of elements in a bucket: 32 MiB. A larger parameter is a bucket by itself."""


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
    """Mapping of a model's parameters to fp32 master weights, which the optimizer steps instead.

    As soon as the backward pass has computed the gradients of a bucket of parameters, they are added in fp32 to the
    gradients of the master weights and freed. Gradients are averaged over the ranks of a group in the same buckets,
    overlapped with the backward pass. Call `finish_backward` after each backward pass, and `finish_reduction`
    before a step.

    The backward pass raises a UserError for a gradient that arrives after its bucket's reduction has started.

    Attributes:
        reduces: True if the next backward pass is the last one before a step.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, group: ProcessGroup | None, peers: int,
                 reduced: torch.dtype = torch.float32) -> None:
        """Copy the model's fp32 parameters to master weights, and cast the parameters to `dtype`.

        Args:
            group: the ranks with the same parameters; None for the whole world, as in torch.
            peers: number of ranks in the group.
            reduced: dtype of the gradient reduction.
        """
        self._names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        parameters = list(self._names)
        self._masters = {parameter: parameter.detach().clone() for parameter in parameters}
        self._group, self._share = group, 1.0 / peers
        self._outdated = set(parameters)  # gradients are of the previous step
        self.reduces = True
        # A backward pass computes the gradients of the last layers first.
        self._buckets = list(_buckets(reversed(parameters), self._masters, reduced))
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._first = self._next = 0 if peers > 1 else len(self._buckets)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulate)

    def __getitem__(self, parameter: nn.Parameter) -> Tensor:
        return self._masters[parameter]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._masters)

    def __len__(self) -> int:
        return len(self._masters)

    def groups(self, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return optimizer groups of the master weights, given the parameters' groups."""
        return [{**group, "params": [self[parameter] for parameter in group["params"]]} for group in groups]

    def finish_backward(self) -> None:
        """Add the gradients of incomplete buckets."""
        for bucket in self._buckets:
            self._add(bucket)

    def finish_reduction(self) -> None:
        """Average all gradients over the ranks, also those that no backward pass computed, and wait."""
        for parameter in self._outdated:
            self._gradient(parameter).zero_()
        self._outdated = set(self._masters)
        self._reduce(len(self._buckets))
        for bucket in self._buckets:
            bucket.wait()
        self._next = self._first

    def round(self) -> None:
        """Copy the rounded master weights to the parameters, after a step or a load."""
        with torch.no_grad():
            foreach_copy_(list(self._masters), list(self._masters.values()))

    def _accumulate(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        bucket = self._bucket_of[parameter]
        if bucket.is_reducing:
            # Adding it to this rank's sum would make the weights of the ranks differ.
            raise UserError(f"the gradient of {self._names[parameter]} was computed again after its reduction over"
                            " ranks had started", where="layout ddp",
                            instead="use_reentrant=False in torch.utils.checkpoint, which computes it once")
        bucket.computed[parameter] = None
        if len(bucket.computed) < len(bucket.parameters):
            return
        self._add(bucket)
        bucket.is_ready = self.reduces
        ready = self._next
        while ready < len(self._buckets) and self._buckets[ready].is_ready:
            ready += 1
        self._reduce(ready)

    def _add(self, bucket: _Bucket) -> None:
        """Add the computed gradients of a bucket to those of the master weights, and free them."""
        first = [parameter for parameter in bucket.computed if parameter in self._outdated]
        if first:
            # Overwriting takes less than half the memory traffic of clearing and adding.
            totals = [self._gradient(parameter) for parameter in first]
            foreach_copy_(totals, [parameter.grad for parameter in first])
            if self._share != 1:
                foreach_mul_(totals, self._share)
        for parameter in bucket.computed:
            assert parameter.grad is not None
            if parameter not in self._outdated:
                self._gradient(parameter).add_(parameter.grad, alpha=self._share)
            parameter.grad = None
        self._outdated.difference_update(first)
        bucket.computed.clear()

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        master = self._masters[parameter]
        if master.grad is None:  # after a script's optimizer.zero_grad()
            master.grad = self._bucket_of[parameter].views[parameter].zero_()
        return master.grad

    def _reduce(self, end: int) -> None:
        """Start reducing the buckets up to `end`, in the same order on all ranks."""
        for bucket in self._buckets[self._next:end]:
            bucket.reduce(self._group)
        self._next = max(self._next, end)


class _Bucket:
    """Gradients of consecutive parameters in a flat fp32 tensor.

    Attributes:
        computed: parameters with a gradient of the current backward pass, in order (a dict for its order).
        is_ready: True if the gradients of the step are complete.
        views: gradient of each parameter's master weights.
    """

    def __init__(self, parameters: list[nn.Parameter], masters: Mapping[nn.Parameter, Tensor],
                 reduced: torch.dtype) -> None:
        self.parameters = parameters
        self.computed: dict[nn.Parameter, None] = {}
        self.is_ready = False
        self._reduced = reduced
        self._work: tuple[torch.distributed.Work, Tensor] | None = None
        sizes = [parameter.numel() for parameter in parameters]
        self.gradients = torch.zeros(sum(sizes), device=parameters[0].device)
        self.views = {parameter: flat.view(parameter.shape)
                      for parameter, flat in zip(parameters, self.gradients.split(sizes), strict=True)}
        for parameter, view in self.views.items():
            masters[parameter].grad = view

    @property
    def is_reducing(self) -> bool:
        """True between `reduce` and `wait`."""
        return self._work is not None

    def reduce(self, group: ProcessGroup | None) -> None:
        """Start the all-reduce of the bucket."""
        reduced = self.gradients.to(self._reduced)
        work = torch.distributed.all_reduce(reduced, group=group, async_op=True)
        self._work = work, reduced

    def wait(self) -> None:
        """Wait for the all-reduce, if any, and prepare for the next step."""
        if self._work is not None:
            work, reduced = self._work
            work.wait()
            if reduced is not self.gradients:
                self.gradients.copy_(reduced)
        self._work, self.is_ready = None, False


def _buckets(parameters: Iterable[nn.Parameter], masters: Mapping[nn.Parameter, Tensor],
             reduced: torch.dtype) -> Iterator[_Bucket]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(member.numel() for member in bucket) + parameter.numel() > _BUCKET:
            yield _Bucket(bucket, masters, reduced)
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield _Bucket(bucket, masters, reduced)
