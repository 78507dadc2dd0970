"""Retention of a run's checkpoints, and the search for the checkpoint to load (imports no torch)."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.core.base import UserError, did_you_mean, print_lines
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training.checkpoint.chain import on_chain
from ezpz_llm.training.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpointError,
    all_damaged_error,
    check_size,
    complete_checkpoints,
    folder_name,
    latest_checkpoint,
    read_manifest,
    step_of,
)


@dataclass(frozen=True)
class Keep:
    """Retention rule: keep the last `last` checkpoints (at least 1), and multiples of `every` steps (0: none)."""

    last: int
    every: int = 0


def prune(run_dir: RunDir, keep: Keep) -> list[Path]:
    """Remove complete checkpoints that `keep` does not cover; return the former paths of those removed.

    Print a warning for each checkpoint that cannot be removed.

    `keep` applies to the chain of the checkpoint that `latest` names (see `ezpz_llm.training.checkpoint.chain`).
    Abandoned checkpoints do not count. They are removed once they are older than the last `keep.last` of the chain.

    Call from one process, after a successful save.
    """
    newest = latest_checkpoint(run_dir.checkpoints)
    if newest is None or not (newest / MANIFEST).is_file():
        return []
    older = [path for path in complete_checkpoints(run_dir.checkpoints) if step_of(path) < step_of(newest)]
    chain = [newest, *on_chain(older, newest)]
    if len(chain) <= max(keep.last, 1):
        return []
    kept = {path for path in chain if keep.every and step_of(path) % keep.every == 0}
    oldest = chain[max(keep.last, 1) - 1]
    excess = [path for path in older if step_of(path) < step_of(oldest) and path not in kept]
    removed = []
    for path in excess:
        # Rename first: an interrupted removal must not leave a folder that looks complete.
        try:
            renamed = path.rename(path.with_name(f".{path.name}.removed"))
        except OSError as error:
            print_lines(f"warning: the old checkpoint {path} cannot be removed: {error.strerror}; the next save "
                        "tries again", file=sys.stderr)
            continue
        shutil.rmtree(renamed, ignore_errors=True)
        removed.append(path)
    return removed


def find(where: str | Path) -> Path:
    """Return the checkpoint at `where`: the folder itself, or the newest intact one of a run directory.

    This checks file sizes only; loading also checks hashes.

    Raises:
        UserError: there is no checkpoint, or in each the manifest is invalid or a file missing or truncated.
    """
    skipped: list[DamagedCheckpointError] = []
    for folder in candidates(where):
        try:
            for record in read_manifest(folder):
                check_size(folder, record)
        except DamagedCheckpointError as error:
            skipped.append(error)
        else:
            return folder
    raise all_damaged_error(skipped)


def has_checkpoint(where: str | Path) -> bool:
    """Return True if `where` has a checkpoint, even if damaged."""
    try:
        return bool(candidates(where))
    except UserError:
        return False


def candidates(where: str | Path) -> list[Path]:
    """Return the checkpoints at `where` in the order to try them: the folder itself, or those of a run directory.

    For a run directory, return the checkpoint that `latest` names, even if it is missing, and then those that it
    continues from.

    Raises:
        UserError: there is no checkpoint.
    """
    path = Path(where)
    if not path.is_dir():
        raise UserError(f"no run directory or checkpoint at {path}", instead=did_you_mean(path))
    if (path / MANIFEST).is_file():
        return [path]
    checkpoints = path if path.name == "checkpoints" else RunDir(path).checkpoints
    newest = latest_checkpoint(checkpoints)
    older = [folder for folder in [*complete_checkpoints(checkpoints), *_replaced_checkpoints(checkpoints)]
             if newest is None or step_of(folder) < step_of(newest)]
    folders = [*([newest] if newest else []), *on_chain(older, newest)]
    if not folders:
        raise UserError(f"no complete checkpoint in {path}",
                        instead="name a run directory or a checkpoints/step-… folder in one")
    return folders


def _replaced_checkpoints(checkpoints: Path) -> list[Path]:
    """Return checkpoints that were being replaced when the run was killed (see `publish`)."""
    return [path for path in checkpoints.glob(".step-*.replaced")
            if (path / MANIFEST).is_file() and not (checkpoints / folder_name(step_of(path))).exists()]
