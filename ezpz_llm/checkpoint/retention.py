"""Checkpoints of a run: which are kept, and the one that a run directory or folder stands for (no torch)."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.base import UserError, nearest
from ezpz_llm.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    check_size,
    complete,
    folder_name,
    latest,
    none_whole,
    read_manifest,
    step_of,
)
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


# The checkpoint that a run directory, or a folder in one, stands for.
def find(where: str | Path) -> Path:
    """The checkpoint that `where` means: a checkpoint's own folder, or the newest whole one of a run directory.

    Sizes are compared with the manifest; hashes only when the checkpoint is loaded.

    Raises:
        UserError: there is none at that place, or only ones with a file missing or cut short.
    """
    passed_over: list[Damaged] = []
    for folder in candidates(where):
        try:
            for record in read_manifest(folder):
                check_size(folder, record)
        except Damaged as damage:
            passed_over.append(damage)
        else:
            return folder
    raise none_whole(passed_over)


def has_any(where: str | Path) -> bool:
    """True if there is a checkpoint at that place, whole or not."""
    try:
        return bool(candidates(where))
    except UserError:
        return False


def candidates(where: str | Path) -> list[Path]:
    """Return the checkpoints that `where` may mean, best first: one folder, or those of a run directory.

    Of a run these are the one that `latest` names, even if it is not there, and then all before it; later ones are
    of a continuation that was abandoned. At least one.

    Raises:
        UserError: there is nothing at that place.
    """
    path = Path(where)
    if not path.is_dir():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = [str(path.with_name(name)) for name in nearest(path.name, siblings)]
        raise UserError(f"no run directory or checkpoint at {path}", where="--resume",
                        instead=f"did you mean {' or '.join(near)}?" if near else None)
    if (path / MANIFEST).is_file():
        return [path]
    checkpoints = path if path.name == "checkpoints" else RunDir(path).checkpoints
    newest = latest(checkpoints)
    found = [folder for folder in [*complete(checkpoints), *_put_aside(checkpoints)]
             if newest is None or step_of(folder) < step_of(newest)]
    found = [*([newest] if newest else []), *sorted(found, key=step_of, reverse=True)]
    if not found:
        raise UserError(f"no complete checkpoint in {path}", where="--resume",
                        instead="name a run directory or a checkpoints/step-… folder in one")
    return found


def _put_aside(checkpoints: Path) -> list[Path]:
    """Checkpoints that were about to be replaced when the run was killed (see `publish`)."""
    return [path for path in checkpoints.glob(".step-*.replaced")
            if (path / MANIFEST).is_file() and not (checkpoints / folder_name(step_of(path))).exists()]
