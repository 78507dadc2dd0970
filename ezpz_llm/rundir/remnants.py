"""What killed runs leave half written in a run directory. Only its owner may sweep it: nobody else writes there."""

from __future__ import annotations

import shutil
from pathlib import Path

_HALF = (".step-*.partial", ".step-*.removed")


def sweep_checkpoints(checkpoints: Path) -> None:
    """Remove checkpoints that were never completed, or not removed to their end."""
    for pattern in _HALF:
        for left in checkpoints.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)
