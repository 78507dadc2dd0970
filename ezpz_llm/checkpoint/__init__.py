"""Checkpoints that any layout can load, whatever layout saved them (see docs/checkpoints.md).

`find`, `prune` and `Keep` import no torch; what does is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

from ezpz_llm.checkpoint.manifest import Damaged, Keep, find, prune

__all__ = ["Damaged", "Keep", "NotWritten", "Saved", "Saver", "find", "load", "load_newest", "prune", "save"]

_LAZY = {"load": "reader", "load_newest": "reader", "save": "saver", "Saver": "saver", "Saved": "saver",
         "NotWritten": "saver"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
