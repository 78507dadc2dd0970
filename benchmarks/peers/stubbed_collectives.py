"""Stubs of collectives that return at once, to measure the cost of communication in a step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _world

_FAKE_BACKENDS: weakref.WeakKeyDictionary[ProcessGroup, Any] = weakref.WeakKeyDictionary()


@contextmanager
def stubbed_collectives() -> Iterator[None]:
    """Make every collective, send, and receive of every process group return at once inside this context.

    Results have the right shapes but wrong values: a rank gets its own values in place of the other ranks' values.
    All ranks must enter and leave between the same collectives.
    """
    with ExitStack() as stack:
        for group in list(_world.pg_map):
            for device in group._device_types:
                stack.enter_context(_stubbed(group, device))
        yield


@contextmanager
def _stubbed(group: ProcessGroup, device: torch.device) -> Iterator[None]:
    kinds = ProcessGroup.BackendType
    real: Any = group._get_backend(device)
    group._register_backend(device, kinds.CUSTOM, _fake_backend(group))
    try:
        yield
    finally:
        # Registering a backend type that the group already has restores the earlier backend.
        group._register_backend(device, getattr(kinds, real.name().upper(), kinds.CUSTOM), real)


def _fake_backend(group: ProcessGroup) -> Any:
    """Return a group's fake backend, from torch's own tests. It copies inputs to outputs and completes at once.

    Each group always gets the same backend, since a group that is bound to a device keeps its first one.
    """
    if group not in _FAKE_BACKENDS:
        make = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
        _FAKE_BACKENDS[group] = make(group.rank(), group.size())
    return _FAKE_BACKENDS[group]
