"""What a checkpoint says of itself (imports no torch)."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ezpz_llm.base.errors import UserError
from ezpz_llm.checkpoint.folder import LATEST, MANIFEST, complete, latest
from ezpz_llm.checkpoint.index import Parameter, check_model, read_index
from ezpz_llm.checkpoint.manifest import read_manifest, read_state, verify
from ezpz_llm.hf.source import Source
from ezpz_llm.model.config import ModelConfig, parameter_count
from ezpz_llm.model.parameters import parameter_shapes
from ezpz_llm.rundir import RunDir


def describe(source: Source) -> dict[str, Any]:
    """The facts of a checkpoint or of a Hugging Face folder, as JSON has them."""
    facts: dict[str, Any] = {"folder": str(source.folder), "kind": source.kind, "model": asdict(source.model),
                             "parameters": parameter_count(source.model)}
    if source.kind == "hf":
        return facts
    files = read_manifest(source.folder)
    index = read_index(source.folder)
    state = {name: value for name, value in source.state.items() if name not in ("model", "tokenizer", "format")}
    return {**facts, "state": state, "tokenizer": source.tokenizer and source.tokenizer["name"],
            "tensors": list(index.kinds), "pieces": sum(len(p.pieces) for p in index.parameters.values()),
            "files": {file.name: file.size for file in files}, "bytes": sum(file.size for file in files)}


def parameter_lines(folder: Path) -> list[str]:
    """Each parameter: name, shape, elements, and in how many pieces it lies in which files."""
    return [_line(name, found) for name, found in read_index(folder).parameters.items()]


def _line(name: str, found: Parameter) -> str:
    files = sorted({piece.file for piece in found.pieces})
    shape = "x".join(map(str, found.shape))
    return (f"{name:<40} {shape:>14} {math.prod(found.shape):>14,}  {len(found.pieces)} piece(s) in "
            f"{files[0]}{f' … {files[-1]}' if len(files) > 1 else ''}")


def as_text(facts: dict[str, Any]) -> str:
    """The facts for people."""
    model = facts["model"]
    rows = [("folder", facts["folder"]),
            ("model", f"{model['n_layer']} layers, {model['n_head']} heads ({model['n_kv_head']} of keys), "
                      f"{model['n_embd']} wide, context {model['block_size']}, vocabulary {model['vocab_size']} in "
                      f"{-(-model['vocab_size'] // model['vocab_multiple']) * model['vocab_multiple']} rows"),
            ("kind", f"{model['norm']}, {model['position']} positions, {model['mlp']}, "
                     f"biases {'yes' if model['bias'] else 'no'}, tied head {'yes' if model['tied'] else 'no'}"),
            ("parameters", f"{facts['parameters']:,}")]
    if facts["kind"] == "checkpoint":
        rows += [(name, _short(value)) for name, value in facts["state"].items()]
        rows += [("tokenizer", facts["tokenizer"] or "not known"),
                 ("tensors", f"{', '.join(facts['tensors'])} in {facts['pieces']} pieces"),
                 ("files", f"{len(facts['files'])}, {facts['bytes']:,} bytes")]
    return "\n".join(f"{name:<15} {value}" for name, value in rows)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(inner)}" for key, inner in value.items())
    return "-" if value is None else str(value)


# Is every checkpoint of a run what was saved?
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
