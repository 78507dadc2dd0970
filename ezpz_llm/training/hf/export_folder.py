"""Folder of an export: sharded safetensors files written one tensor at a time; it appears only when complete."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ezpz_llm.core.base import UserError
from ezpz_llm.core.base.version import __version__
from ezpz_llm.core.rundir import write_json
from ezpz_llm.training.checkpoint.state import State
from ezpz_llm.training.checkpoint.writer import write_tensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ExportTensor:
    """Tensor to export. `read` returns its values, with this shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Exported:
    """Result of an export: its folder, the size in bytes and number of weights files, and notes for the user."""

    folder: Path
    bytes: int
    files: int
    notes: tuple[str, ...]


def check_out(out: Path) -> None:
    """Raise a UserError if `out` exists and is not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError("the path to export to is not an empty folder", where=str(out), instead="a new folder")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to write into, which is then renamed to `out`. After an error, it is removed.

    Raises:
        UserError: the disk is full, or another OSError occurred in the context.
    """
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        raise UserError(f"the export could not be written: {error.strerror}", where=str(error.filename or out),
                        instead="free disk space there, or choose another folder", exit_code=1) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_weights(folder: Path, tensors: Sequence[ExportTensor], shard_bytes: float) -> int:
    """Write model.safetensors, or several files and their index; return the number of files.

    Args:
        shard_bytes: maximum size of a file; a larger tensor has its own file.
    """
    shards = _split_into_shards(tensors, shard_bytes)
    names = [_shard_file_name(number, len(shards)) for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        outline = {tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in shard}
        # transformers requires this metadata.
        write_tensors(folder / name, outline, (tensor.read() for tensor in shard), {"format": "pt"})
    if len(shards) > 1:
        write_json(folder / "model.safetensors.index.json", {
            "metadata": {"total_size": sum(tensor.bytes for tensor in tensors)},
            "weight_map": {tensor.name: name for name, shard in zip(names, shards, strict=True)
                           for tensor in shard}})
    return len(shards)


def _split_into_shards(tensors: Sequence[ExportTensor], limit: float) -> list[list[ExportTensor]]:
    shards: list[list[ExportTensor]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor.bytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.bytes
    return shards


def _shard_file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def dtype_name(dtype: str) -> str:
    """Return torch's name of one of DTYPES, as config.json has it."""
    return str(DTYPES[dtype]).removeprefix("torch.")


def make_provenance(folder: Path, state: State | None) -> dict[str, Any]:
    """Return the member of an exported config.json that names its checkpoint or Hugging Face folder."""
    provenance: dict[str, Any] = {"version": __version__, "from": str(folder.absolute())}
    if state is not None:
        provenance["step"] = state.step
        if state.consumed is not None:
            provenance["consumed"] = state.consumed
    return {"ezpz_llm": provenance}
