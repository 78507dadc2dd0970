"""Checkpoints that any layout can load, whatever layout saved them (see docs/checkpoints.md).

`find` and `prune` import no torch; `save` and `load`, which do, are imported when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

from ezpz_llm.engine.checkpoint.folder import find, prune

__all__ = ["find", "load", "prune", "save"]

_LAZY = {"load": "reader", "save": "writer"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
