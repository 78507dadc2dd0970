"""Checkpoint folders: their names, starting one and publishing it (no torch).

A folder with a manifest is complete: everything is written as `.step-….partial`, the manifest last, then renamed.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from ezpz_llm.rundir import write_atomic
from ezpz_llm.rundir.files import sweep_checkpoints

MANIFEST, INDEX, STATE, LATEST = "manifest.json", "index.json", "state.json", "latest"

_NAME = re.compile(r"step-(\d{8,})")


def folder_name(step: int) -> str:
    return f"step-{step:08d}"



def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"



def step_of(folder: Path) -> int:
    """The step of a checkpoint, from its name."""
    return int(re.findall(r"step-(\d+)", folder.name)[0])



def complete(checkpoints: Path) -> list[Path]:
    """The complete checkpoints in a run's `checkpoints/` folder, by step."""
    if not checkpoints.is_dir():
        return []
    found = [path for path in checkpoints.iterdir() if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=step_of)



def latest(checkpoints: Path) -> Path | None:
    """The checkpoint that `latest` names, whether or not it is there; None where it names none."""
    pointer = checkpoints / LATEST
    name = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
    return checkpoints / name if _NAME.fullmatch(name) else None



def start_partial(checkpoints: Path, step: int) -> Path:
    """A new empty folder to write into; what killed runs left half written in `checkpoints` is removed."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    sweep_checkpoints(checkpoints)
    partial = checkpoints / f".{folder_name(step)}.partial"
    partial.mkdir()
    return partial



def publish(partial: Path, step: int) -> Path:
    """Give a written folder its final name and let `latest` name it.

    A checkpoint of the same step is replaced. `latest` never names a folder that is not there: should the replaced
    one be the latest, the one before it is named, or none, until the new one stands.
    """
    checkpoints = partial.parent
    final = checkpoints / folder_name(step)
    pointer = checkpoints / LATEST
    _flush(partial)
    if final.exists():
        if latest(checkpoints) == final:
            before = [path for path in complete(checkpoints) if step_of(path) < step]
            if before:
                write_atomic(pointer, before[-1].name + "\n")
            else:
                pointer.unlink()
        aside = checkpoints / f".{final.name}.replaced"
        # Left by a kill after its successor stood.
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    partial.rename(final)
    _flush(checkpoints)
    write_atomic(pointer, final.name + "\n")
    for replaced in checkpoints.glob(".step-*.replaced"):
        shutil.rmtree(replaced, ignore_errors=True)
    return final



def _flush(folder: Path) -> None:
    """Let the names in a folder reach the disk: the folder before `latest`, even if the power goes."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
