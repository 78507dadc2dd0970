"""Folders in memory that runs left on this node when node and agent were ended without warning."""

from __future__ import annotations

import time

from ezpz_llm.base.private import PrivateFolder, remove_private
from ezpz_llm.launch.node.folder import own_folders
from ezpz_llm.launch.node.processes import marked, place

_QUIET_S = 600.0
"""A folder written to within this time is kept where its processes may not be seen: in a container."""


def remove_stale(own_run_id: str) -> None:
    """Remove this user's folders of runs of which no process lives."""
    here = place()
    for folder, run_id, where in own_folders():
        if run_id != own_run_id and (where == here or _is_quiet(folder)) and not any(marked(run_id)):
            remove_private(folder.path)


def _is_quiet(folder: PrivateFolder) -> bool:
    try:
        newest = max(folder.path.stat().st_mtime, *(folder.stat(name).st_mtime for name in folder.names()), 0.0)
    except OSError:
        return False
    return time.time() - newest > _QUIET_S
