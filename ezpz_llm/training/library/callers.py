"""Caller of a function of torch: the script, or the code of a layout."""

from __future__ import annotations

import inspect

_OF_LAYOUTS = ("ezpz_llm.", "deepspeed.", "torch.distributed.fsdp.", "torch.distributed.tensor.",
               "torch.distributed._composable.", "torch.nn.modules.linear.")
"""Packages and modules that use shards. A linear layer under tensor parallelism has one during a pass."""


def is_called_by_script() -> bool:
    """Return True if the caller of the calling function, without frames of torch, is not the layout's code."""
    frame = inspect.currentframe()
    frame = frame and frame.f_back and frame.f_back.f_back
    while frame is not None:
        module = f"{frame.f_globals.get('__name__')}."
        if module.startswith(_OF_LAYOUTS):
            return False
        if not module.startswith("torch."):
            return True
        frame = frame.f_back
    return False
