"""Is every checkpoint of a run what was saved?"""

from __future__ import annotations

from pathlib import Path

from ezpz_llm.engine.checkpoint.folder import LATEST, MANIFEST, complete, latest
from ezpz_llm.engine.checkpoint.index import check_model, read_index
from ezpz_llm.engine.checkpoint.manifest import read_manifest, read_state, verify
from ezpz_llm.errors import UserError
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.shapes import parameter_shapes
from ezpz_llm.rundir import RunDir


def folders_of(path: Path) -> list[Path]:
    """The checkpoints at a place: one's own folder, or all of a run directory, oldest first.

    Raises:
        UserError: there is none.
    """
    if (path / MANIFEST).is_file():
        return [path]
    checkpoints = path if path.name == "checkpoints" else RunDir(path).checkpoints
    found = complete(checkpoints)
    if not found:
        raise UserError(f"no complete checkpoint in {path}", where="FOLDER",
                        instead="a run directory, or a checkpoints/step-… folder in one")
    named = latest(checkpoints)
    if named is not None and named not in found:
        raise UserError(f"{LATEST} names {named.name}, which is not there", where=str(checkpoints), exit_code=1)
    return found


def verify_folder(folder: Path) -> int:
    """Compare files with their hashes, and the index with the model: each element of each parameter once.

    Returns:
        The bytes that were read.

    Raises:
        UserError: names what is damaged.
    """
    records = read_manifest(folder)
    verify(folder, records)
    model = ModelConfig(**read_state(folder)["model"])
    check_model(read_index(folder), parameter_shapes(model), folder)
    return sum(record.size for record in records)
