"""Ranks, devices, process groups and seeds of a run.

What needs torch is imported when it is first asked for, so that seeds and heartbeats stay light.
"""

from __future__ import annotations

import importlib
from typing import Any

from ezpz_llm.dist.heartbeat import Heartbeat

__all__ = ["Degrees", "Dist", "Heartbeat", "Mesh"]

_LAZY = {"Degrees": "degrees", "Mesh": "mesh", "Dist": "setup"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
