"""Memory that a call allocates and keeps."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch.profiler import profile


def allocated(action: Callable[[], torch.Tensor]) -> int:
    """Return the bytes that torch allocates for CPU tensors during the call and that its result keeps alive."""
    gc.collect()
    with profile(profile_memory=True) as profiler:
        result = action()
    events = profiler.profiler.kineto_results.events()
    del result
    return sum(event.nbytes() for event in events if event.name() == "[memory]")
