"""Which checkpoints of a run are kept (no torch)."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.engine.checkpoint.folder import complete, latest, step_of
from ezpz_llm.rundir import RunDir


@dataclass(frozen=True)
class Keep:
    """The last `last` checkpoints, 1 or more, and besides these all of steps that `every` divides (0: none)."""

    last: int
    every: int = 0


def prune(run_dir: RunDir, keep: Keep) -> list[Path]:
    """Remove complete checkpoints up to the latest, but for those to be kept.

    Later ones than the latest (of a run that was continued from an earlier step) are left alone until the run comes
    to them. One process calls it, after a successful save. Returns what was removed.
    """
    newest = latest(run_dir.checkpoints)
    if newest is None:
        return []
    found = [path for path in complete(run_dir.checkpoints) if step_of(path) <= step_of(newest)]
    doomed = [path for path in found[:-max(keep.last, 1)] if not (keep.every and step_of(path) % keep.every == 0)]
    for path in doomed:
        # Under another name first: a removal cut short must not leave a folder that looks complete. What cannot be
        # removed now is tried again with the next save.
        with contextlib.suppress(OSError):
            shutil.rmtree(path.rename(path.with_name(f".{path.name}.removed")), ignore_errors=True)
    return doomed
