"""Checkpoints that any layout can load, not only the one that saved them (see docs/reference/checkpoints.md).

`find`, `prune` and `Keep` do not import torch; the modules that do are imported on first use.
"""

from __future__ import annotations

from ezpz_llm.core.base import lazy_names
from ezpz_llm.training.checkpoint.manifest import DamagedCheckpointError
from ezpz_llm.training.checkpoint.retention import Keep, find, prune
from ezpz_llm.training.checkpoint.state import Progress

__all__ = ["DamagedCheckpointError", "Keep", "NotWrittenError", "Progress", "Saved", "Saver", "find", "load",
           "load_newest", "prune", "save"]

__getattr__ = lazy_names(__name__, {**dict.fromkeys(("load", "load_newest"), "reader"),
                                    **dict.fromkeys(("save", "Saver", "Saved", "NotWrittenError"), "saver")})
