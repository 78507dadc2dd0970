"""Folders in memory that runs left on this node when node and agent were ended without warning."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from ezpz_llm.launch.node.folder import base, prefix
from ezpz_llm.launch.node.processes import marked

_QUIET_S = 600.0
"""A folder written to within this time is kept: its processes may live in a container, where they are not seen."""


def remove_stale(own_run_id: str) -> None:
    """Remove this user's folders of runs of which no process lives."""
    for folder in base().glob(f"{prefix()}*"):
        run_id = folder.name[len(prefix()):]
        if run_id != own_run_id and _is_quiet(folder) and not any(marked(run_id)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_quiet(folder: Path) -> bool:
    try:
        newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return False
    return time.time() - newest > _QUIET_S
