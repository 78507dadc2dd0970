"""Gradients of replicated parameters: accumulated in fp32, averaged over ranks in the last backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist.torch_internals import foreach_copy_, foreach_mul_

BUCKET = 2 ** 23
"""Maximum number of elements in a bucket: 32 MiB. A larger parameter is a bucket by itself."""


class GradientReducer:
    """Sum of the gradients of a step's micro-batches, and its average over ranks.

    As soon as a backward pass has computed the gradients of a bucket of parameters, they are added in fp32 to the
    bucket and freed. In the last backward pass of a step, the bucket is then reduced, overlapped with the rest of
    the pass. What is reduced is decided when the backward pass starts, so forward passes may come in any order.

    Call `start_backward` before each backward pass, `finish_backward` after it, and `finish_reduction` before a
    step. The backward pass raises a UserError for a gradient that arrives after its bucket's reduction has started.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: ProcessGroup | None, peers: int,
                 reduced: torch.dtype = torch.float32) -> None:
        """Allocate the buckets.

        Args:
            parameters: parameters with gradients, by name, in the order of the model.
            group: the ranks with the same parameters; None for the whole world, as in torch.
            peers: number of ranks in the group.
            reduced: dtype of the reduction.
        """
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._group, self._share = group, 1.0 / peers
        self._outdated = set(self._names)  # gradients are of the previous step
        self._reduces = False
        # A backward pass computes the gradients of the last layers first.
        self._buckets = list(_buckets(reversed(self._names), reduced))
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.views}
        self._first = self._next = 0 if peers > 1 else len(self._buckets)
        # torch keeps hooks where Python's garbage collector does not see a cycle.
        owner = weakref.ref(self)

        def accumulate(parameter: Tensor) -> None:
            if (reducer := owner()) is not None:
                reducer._accumulate(parameter)

        for parameter in self._names:
            parameter.register_post_accumulate_grad_hook(accumulate)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._bucket_of

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return the fp32 gradient of a parameter, in its bucket; complete after `finish_reduction`."""
        return self._bucket_of[parameter].views[parameter]

    @property
    def sums(self) -> list[Tensor]:
        """Gradients of all parameters."""
        return [view for bucket in self._buckets for view in bucket.views.values()]

    def start_backward(self, is_last: bool) -> None:
        """Prepare for a backward pass; `is_last` if it is the last one before a step."""
        self._reduces = is_last

    def finish_backward(self) -> None:
        """Add the gradients of incomplete buckets."""
        for bucket in self._buckets:
            self._add(bucket)

    def finish_reduction(self) -> None:
        """Average all gradients over the ranks, also those that no backward pass computed, and wait."""
        for parameter in self._outdated:
            self.gradient(parameter).zero_()
        self._outdated = set(self._names)
        self._reduce(len(self._buckets))
        for bucket in self._buckets:
            bucket.wait()
        self._next = self._first

    def discard(self) -> None:
        """Discard the gradients since the last step."""
        self._outdated = set(self._names)

    def _accumulate(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        bucket = self._bucket_of[parameter]
        if bucket.is_reducing:
            # Adding it to this rank's sum would make the weights of the ranks differ.
            raise UserError(f"the gradient of {self._names[parameter]} was computed again after its reduction over"
                            " ranks had started", where="layout ddp",
                            instead="use_reentrant=False in torch.utils.checkpoint, which computes it once")
        bucket.computed[parameter] = None
        if len(bucket.computed) < len(bucket.views):
            return
        self._add(bucket)
        bucket.is_ready = self._reduces
        ready = self._next
        while ready < len(self._buckets) and self._buckets[ready].is_ready:
            ready += 1
        self._reduce(ready)

    def _add(self, bucket: _Bucket) -> None:
        """Add the computed gradients of a bucket to their sums, and free them."""
        first = [parameter for parameter in bucket.computed if parameter in self._outdated]
        if first:
            # Overwriting takes less than half the memory traffic of clearing and adding.
            totals = [bucket.views[parameter] for parameter in first]
            foreach_copy_(totals, [parameter.grad for parameter in first])
            if self._share != 1:
                foreach_mul_(totals, self._share)
        for parameter in bucket.computed:
            assert parameter.grad is not None
            if parameter not in self._outdated:
                bucket.views[parameter].add_(parameter.grad, alpha=self._share)
            parameter.grad = None
        self._outdated.difference_update(first)
        bucket.computed.clear()

    def _reduce(self, end: int) -> None:
        """Start reducing the buckets up to `end`, in the same order on all ranks."""
        for bucket in self._buckets[self._next:end]:
            bucket.reduce(self._group)
        self._next = max(self._next, end)


class _Bucket:
    """Gradients of consecutive parameters in a flat fp32 tensor.

    Attributes:
        views: the gradient of each parameter.
        computed: parameters with a gradient of the current backward pass, in order (a dict for its order).
        is_ready: True if the gradients of the step are complete.
    """

    def __init__(self, parameters: list[nn.Parameter], reduced: torch.dtype) -> None:
        self.computed: dict[nn.Parameter, None] = {}
        self.is_ready = False
        self._reduced = reduced
        self._work: tuple[torch.distributed.Work, Tensor] | None = None
        sizes = [parameter.numel() for parameter in parameters]
        self._gradients = torch.zeros(sum(sizes), device=parameters[0].device)
        self.views = {parameter: flat.view(parameter.shape)
                      for parameter, flat in zip(parameters, self._gradients.split(sizes), strict=True)}

    @property
    def is_reducing(self) -> bool:
        """True between `reduce` and `wait`."""
        return self._work is not None

    def reduce(self, group: ProcessGroup | None) -> None:
        """Start the all-reduce of the bucket."""
        reduced = self._gradients.to(self._reduced)
        work = torch.distributed.all_reduce(reduced, group=group, async_op=True)
        self._work = work, reduced

    def wait(self) -> None:
        """Wait for the all-reduce, if any, and prepare for the next step."""
        if self._work is not None:
            work, reduced = self._work
            work.wait()
            if reduced is not self._gradients:
                self._gradients.copy_(reduced)
        self._work, self.is_ready = None, False


def _buckets(parameters: Iterable[nn.Parameter], reduced: torch.dtype) -> Iterator[_Bucket]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(member.numel() for member in bucket) + parameter.numel() > BUCKET:
            yield _Bucket(bucket, reduced)
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield _Bucket(bucket, reduced)
