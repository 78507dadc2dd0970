"""Write a model as a folder that transformers' AutoModelForCausalLM loads, one tensor in memory at a time."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ezpz_llm import __version__
from ezpz_llm.base.errors import UserError
from ezpz_llm.checkpoint.writer import write_tensors
from ezpz_llm.hf.config import Stored, stored_tensors, to_hf
from ezpz_llm.hf.source import CONFIG, Source
from ezpz_llm.hf.tokenizer import write_tokenizer
from ezpz_llm.hf.weights import Weights, open_weights
from ezpz_llm.model.parameters import parameter_shapes, whole
from ezpz_llm.rundir import write_json

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Exported:
    """Result of an export: its folder, the bytes of weights, the number of their files, and what is missing."""

    folder: Path
    bytes: int
    files: int
    notes: tuple[str, ...]


def export(source: Source, out: Path, *, dtype: str = "fp32", shard_bytes: int = SHARD_BYTES) -> Exported:
    """Export a model; the folder appears whole or not at all.

    The logits of real tokens are equal, up to the rounding of `dtype`; padded rows of the vocabulary are left out,
    and biases that the model has not are written as zeros where GPT-2 has them.

    Args:
        out: a folder that is not there yet, or is empty.
        dtype: one of DTYPES.
        shard_bytes: the most that one file of weights gets; a larger tensor gets a file of its own.

    Raises:
        UserError: the checkpoint is damaged, Hugging Face has no such model, the folder is in use, the disk full.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError("the folder to export to is not empty", where=str(out), instead="a new folder")
    tensors = stored_tensors(source.model)
    partial = out.with_name(f".{out.name}.partial")
    with open_weights(source) as weights, _writing(out, partial):
        partial.mkdir(parents=True)
        shards = _shards(tensors, DTYPES[dtype].itemsize, shard_bytes)
        for number, shard in enumerate(shards):
            _write_shard(partial / _name(number, len(shards)), shard, weights, DTYPES[dtype])
        total = sum(_numel(tensor) for tensor in tensors) * DTYPES[dtype].itemsize
        if len(shards) > 1:
            places = {tensor.name: _name(number, len(shards)) for number, shard in enumerate(shards)
                      for tensor in shard}
            write_json(partial / "model.safetensors.index.json",
                       {"metadata": {"total_size": total}, "weight_map": places})
        end_of_text, note = write_tokenizer(source.tokenizer, source.model.block_size, partial)
        _write_config(partial, source, dtype, end_of_text)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    return Exported(out, total, len(shards), () if note is None else (f"no tokenizer was written: {note}",))


def _write_config(folder: Path, source: Source, dtype: str, end_of_text: int | None) -> None:
    made_by = {"version": __version__, "from": str(source.folder.absolute()),
               **{key: source.state[key] for key in ("step", "consumed") if key in source.state}}
    write_json(folder / CONFIG, {**to_hf(source.model, dtype=str(DTYPES[dtype]).removeprefix("torch."),
                                         end_of_text=end_of_text), "ezpz_llm": made_by})


def _write_shard(path: Path, shard: list[Stored], weights: Weights, dtype: torch.dtype) -> None:
    outline = {tensor.name: torch.empty(tensor.stored_shape, dtype=dtype, device="meta") for tensor in shard}
    # transformers asks which library's layout the tensors have.
    write_tensors(path, outline, (_values(tensor, weights).to(dtype) for tensor in shard), {"format": "pt"})


def _values(tensor: Stored, weights: Weights) -> Tensor:
    if tensor.ours not in parameter_shapes(weights.model):
        return torch.zeros(tensor.stored_shape)  # a bias that the model has not
    box = ((tensor.first, tensor.stop), *whole(tensor.shape[1:]))
    values = weights.read(tensor.ours, box)
    return values.T if tensor.transposed else values


def _shards(tensors: list[Stored], item_bytes: int, limit: int) -> list[list[Stored]]:
    shards: list[list[Stored]] = [[]]
    used = 0
    for tensor in tensors:
        size = _numel(tensor) * item_bytes
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += size
    return shards


def _numel(tensor: Stored) -> int:
    return math.prod(tensor.shape)


def _name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


@contextlib.contextmanager
def _writing(out: Path, partial: Path) -> Iterator[None]:
    """Leave nothing half done, and turn the system's refusal to write into a UserError."""
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield
    except OSError as error:
        raise UserError(f"the export could not be written: {error.strerror}", where=str(error.filename or out),
                        instead="make room there, or name another folder", exit_code=1) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
