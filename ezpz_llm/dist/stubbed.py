"""Collectives that move nothing and wait for nobody: what a step takes without them is what they cost."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ezpz_llm.dist.private_names import WORLD, FakeProcessGroup

_STAND_INS: weakref.WeakKeyDictionary[ProcessGroup, Any] = weakref.WeakKeyDictionary()

@contextmanager
def stubbed_collectives() -> Iterator[None]:
    """Inside, every collective, send and receive of every process group returns at once.

    A rank then has its own values where the others' should be: whatever is computed from them is worthless, though
    it has the right shapes. All ranks have to go in and out between the same collectives.
    """
    with ExitStack() as stack:
        for group in list(WORLD.pg_map):
            for device in group._device_types:
                stack.enter_context(_stubbed(group, device))
        # DistributedDataParallel wants the reduced bucket from the work itself, which the stand-in does not give.
        DistributedDataParallel.require_backward_grad_sync = property(lambda self: False, lambda self, value: None)
        stack.callback(lambda: delattr(DistributedDataParallel, "require_backward_grad_sync"))
        yield


@contextmanager
def _stubbed(group: ProcessGroup, device: torch.device) -> Iterator[None]:
    kinds = ProcessGroup.BackendType
    real: Any = group._get_backend(device)
    group._register_backend(device, kinds.CUSTOM, _stand_in(group))
    try:
        yield
    finally:
        # Of a kind that the group knows it takes the backend that it had.
        group._register_backend(device, getattr(kinds, real.name().upper(), kinds.CUSTOM), real)


def _stand_in(group: ProcessGroup) -> Any:
    """A backend of torch's own tests, which copies inputs to outputs and reports everything as done.

    One a group, always the same: a group that is bound to a device keeps the first, and takes no other.
    """
    if group not in _STAND_INS:
        make = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
        _STAND_INS[group] = make(group.rank(), group.size())
    return _STAND_INS[group]
