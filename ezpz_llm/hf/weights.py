"""Weights of a checkpoint or a Hugging Face folder, read one box of one parameter at a time.

Both speak of the plain model's parameters (`ezpz_llm.model.parameters`), so that any layout can fill any part of a
model with them and an export can write them tensor by tensor: nobody holds more than what is asked for.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ezpz_llm import __version__
from ezpz_llm.base import UserError, as_dataclass, file_in, open_regular, read_json
from ezpz_llm.checkpoint.index import WEIGHT, check_shapes, read_index
from ezpz_llm.checkpoint.manifest import read_manifest, verify
from ezpz_llm.checkpoint.reader import fill
from ezpz_llm.checkpoint.writer import write_tensors
from ezpz_llm.dist import Dist
from ezpz_llm.dist.agree import raise_together, together
from ezpz_llm.hf.config import Stored, stored_tensors, to_hf
from ezpz_llm.hf.source import CONFIG, Source, adapter_error
from ezpz_llm.hf.tokenizer import entry_of, write_tokenizer
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.parameters import HEAD, TABLE, Box, parameter_shapes, size, whole
from ezpz_llm.rundir import write_json

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_WRAPPERS = {"_orig_mod", "module", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts of names that torch.compile, DDP, Fabric, FSDP, and activation checkpointing add."""
_ROWS_AT_ONCE = 8192
# Masks and angles that older versions stored beside the weights.
_NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def open_weights(source: Source, check_hashes: bool = True) -> Weights:
    """The weights of a source; use it as a context manager.

    Args:
        check_hashes: compare a checkpoint's files with its manifest first.

    Raises:
        UserError: they are damaged, or not those of the source's model.
    """
    if source.kind == "checkpoint":
        return CheckpointWeights(source, check_hashes)
    weights = HfWeights(source)
    weights.check_head()
    return weights


def open_for_ranks(source: Source, dist: Dist) -> Weights:
    """The same on every rank, which share the work of comparing hashes. Collective.

    Raises:
        UserError: the same on every rank.
    """
    def opened() -> Weights:
        """The weights; files of a checkpoint are verified by one rank each."""
        if source.kind == "checkpoint":
            verify(source.folder, read_manifest(source.folder)[dist.rank::dist.world_size])
        if dist.is_main:
            return open_weights(source, check_hashes=False)
        return HfWeights(source) if source.kind == "hf" else CheckpointWeights(source, check_hashes=False)

    weights = together(dist, opened)
    if dist.is_main:
        for note in weights.notes:
            print(f"note: {note}", file=sys.stderr, flush=True)
    return weights


class Weights(ABC):
    """Weights of the plain model `model`."""

    def __init__(self, model: ModelConfig, where: Path) -> None:
        self.model, self.where = model, where
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._means: dict[str, Tensor] = {}
        self._non_finite: str | None = None
        self.notes: list[str] = []
        """Notes for the user about how the files were read."""

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a parameter, fp32 on CPU, in the box's shape.

        Rows of the vocabulary beyond those that are stored, the padding of another width, are the mean of the real
        ones. Their logits then are the mean logit, so that all of them together get at most their share of the
        vocabulary of the probability (Jensen's inequality); zero rows would get most of it from a model whose
        logits are all negative, as GPT-2's are.
        """
        first, stop = box[0]
        stored = self.rows(name)
        if name not in (TABLE, HEAD) or stop <= stored:
            return self.read_stored(name, box)
        parts = [self.mean_row(name)[slice(*box[1])].expand(stop - max(first, stored), -1)]
        if first < stored:
            parts.insert(0, self.read_stored(name, ((first, stored), *box[1:])))
        return torch.cat(parts)

    def mean_row(self, name: str) -> Tensor:
        """The mean of a table's rows for real tokens, (C,)."""
        if name not in self._means:
            width, count = self.model.n_embd, self.model.vocab_size
            total = torch.zeros(width, dtype=torch.float64)
            for first in range(0, count, _ROWS_AT_ONCE):
                rows = (first, min(first + _ROWS_AT_ONCE, count))
                total += self.read_stored(name, (rows, (0, width))).double().sum(dim=0)
            self._means[name] = (total / count).float()
        return self._means[name]

    def check_finite(self, dist: Dist | None = None) -> None:
        """Check all values read so far; on all ranks together if `dist` is given.

        Raises:
            UserError: a rank has read NaN or Inf; names the tensor.
        """
        error = None if self._non_finite is None else UserError(
            f"the weights contain NaN or Inf in {self._non_finite}", where=str(self.where),
            instead="weights of an earlier checkpoint: the run that saved these diverged, or the files are damaged")
        if dist is not None:
            raise_together(dist, error)
        elif error is not None:
            raise error

    def _note_non_finite(self, name: str, values: Tensor) -> Tensor:
        """Keep the name of the first tensor with NaN or Inf; an error here would leave other ranks waiting."""
        if self._non_finite is None and not values.isfinite().all():
            self._non_finite = name
        return values

    @abstractmethod
    def rows(self, name: str) -> int:
        """Number of stored rows of a parameter."""

    @abstractmethod
    def read_stored(self, name: str, box: Box) -> Tensor:
        """A box of what is stored."""

    def open(self, name: str) -> Any:
        """A file, mapped when it is first needed.

        Raises:
            UserError: it is not there, or no safetensors file.
        """
        if name not in self._files:
            try:
                open_regular(self.where / name).close()
                self._files[name] = self._stack.enter_context(safe_open(self.where / name, framework="pt"))
            except (UserError, OSError, SafetensorError) as error:
                why = error.found if isinstance(error, UserError) else error
                raise UserError(f"{name} cannot be read: {why}", where=str(self.where)) from error
        return self._files[name]


class CheckpointWeights(Weights):
    """The weights of a training state that any layout wrote."""

    def __init__(self, source: Source, check_hashes: bool) -> None:
        super().__init__(source.model, source.folder)
        if check_hashes:
            verify(source.folder, read_manifest(source.folder))
        index = read_index(source.folder)
        check_shapes(index, parameter_shapes(source.model), source.folder)
        self._parameters = index.parameters

    def rows(self, name: str) -> int:
        """Rows of the stored parameter `name`."""
        return self._parameters[name].shape[0]

    def read_stored(self, name: str, box: Box) -> Tensor:
        """The part `box` of a stored parameter, put together from the ranks' files, in fp32."""
        result = torch.empty(size(box))
        fill({WEIGHT: result}, (box, 0, size(box)), self._parameters[name], self.open)
        return self._note_non_finite(name, result).view([stop - start for start, stop in box])


@dataclass(frozen=True)
class _IndexFile:
    weight_map: dict[str, str]


class HfWeights(Weights):
    """The weights of a GPT-2 or Llama as Hugging Face stores them, in safetensors of any floating-point type."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.model, source.folder)
        self._place = self._find_tensors()
        self._tensors: dict[str, list[Stored]] = {}
        for stored in stored_tensors(source.model):
            self._check(stored)
            self._tensors.setdefault(stored.ours, []).append(stored)
        self._refuse_others()

    def rows(self, name: str) -> int:
        """Rows of the stored parameter `name`, over all tensors that it is made of."""
        return self._tensors[name][-1].stop

    def read_stored(self, name: str, box: Box) -> Tensor:
        """The part `box` of a parameter, put together from the export's tensors, in fp32."""
        parts = []
        for stored in self._tensors[name]:
            first, stop = max(box[0][0], stored.first), min(box[0][1], stored.stop)
            if first < stop:
                sides = (slice(first - stored.first, stop - stored.first), *(slice(*side) for side in box[1:]))
                parts.append(self._note_non_finite(stored.name, self._read(stored, sides).float()))
        return torch.cat(parts)

    def _read(self, stored: Stored, sides: tuple[slice, ...]) -> Tensor:
        tensor = self.open(self._place[stored.name][0]).get_slice(self._place[stored.name][1])
        return tensor[sides[::-1]].T if stored.transposed else tensor[sides]

    def _find_tensors(self) -> dict[str, tuple[str, str]]:
        """Return file and stored name of each tensor, by the name with the base model's prefix."""
        prefix = "transformer." if self.model.position == "learned" else "model."
        where: dict[str, tuple[str, str]] = {}
        wrappers: set[str] = set()
        for file, name in self._stored_names():
            if ".lora_" in name:
                raise adapter_error(self.where)
            parts = name.split(".")
            wrappers.update(_WRAPPERS.intersection(parts))
            plain = ".".join(part for part in parts if part not in _WRAPPERS)
            full = plain if plain == HEAD or plain.startswith(prefix) else prefix + plain
            if full in where:
                raise UserError(f"the weights have the tensor {full} twice: {where[full][1]} in {where[full][0]}, "
                                f"{name} in {file}", where=str(self.where), instead="weights that have it once")
            where[full] = (file, name)
        if wrappers:
            self.notes.append(f"names of weights are read without {', '.join(sorted(wrappers))}, which wrappers of "
                              "a model add")
        if self.model.tied and HEAD in where and self._table not in where:
            where[self._table] = where.pop(HEAD)  # as transformers does
        return where

    @property
    def _table(self) -> str:
        """The stored name of the embedding."""
        return next(stored.name for stored in stored_tensors(self.model) if stored.ours == TABLE)

    def _stored_names(self) -> list[tuple[str, str]]:
        """The file and the name of each stored tensor, from the files that transformers would load."""
        there = [name for name in (_SINGLE, _INDEX, *_PICKLED) if (self.where / name).is_file()]
        if not there or there[0] in _PICKLED:
            raise UserError(f"there is neither {_SINGLE} nor {_INDEX}", where=str(self.where),
                            instead="a checkpoint in safetensors; where there is only pytorch_model.bin, which "
                                    "only unpickling reads, save it again with transformers' save_pretrained")
        if len(there) > 1:
            self.notes.append(f"{self.where} has {' and '.join(there)}: {there[0]} is used, as transformers does")
        if there[0] == _SINGLE:
            return [(_SINGLE, name) for name in self.open(_SINGLE).keys()]  # noqa: SIM118 (it is no mapping)
        where = str(self.where / _INDEX)
        index = as_dataclass(_IndexFile, read_json(self.where / _INDEX), where, drop_unknown=True)
        files = sorted({file_in(self.where, file, where).name for file in index.weight_map.values()})
        stored = [(file, name) for file in files for name in self.open(file).keys()]  # noqa: SIM118
        pairs = set(stored)
        for name, file in index.weight_map.items():
            if (file, name) not in pairs:
                raise UserError(f"{file} has no tensor {name}, which {_INDEX} says is there", where=str(self.where),
                                instead="the index that belongs to these files")
        return stored

    def _check(self, stored: Stored) -> None:
        if stored.name not in self._place:
            tie = ", or set tie_word_embeddings to true there if the head is the embedding"
            raise UserError(f"the weights have no tensor {stored.name}", where=str(self.where),
                            instead="the weights that belong to this config.json" + tie * (stored.ours == HEAD))
        file, name = self._place[stored.name]
        found = tuple(self.open(file).get_slice(name).get_shape())
        if found != stored.stored_shape:
            raise UserError(f"{stored.name} is {list(found)} in the weights, by config.json "
                            f"{list(stored.stored_shape)}", where=str(self.where),
                            instead="the weights that belong to this config.json")

    def check_head(self) -> None:
        """Check that a head stored beside the embedding that it is tied to has the same values.

        Raises:
            UserError: it has others. transformers then computes with both, without tying them.
        """
        if not self.model.tied or HEAD not in self._place:
            return
        head, table = (self.open(file).get_slice(name)
                       for file, name in (self._place[HEAD], self._place[self._table]))
        parts = (slice(first, first + _ROWS_AT_ONCE) for first in range(0, table.get_shape()[0], _ROWS_AT_ONCE))
        # NaN is equal to nothing; weights that have it are rejected by its name.
        if head.get_shape() != table.get_shape() or not all(
                torch.equal(head[part].nan_to_num(), table[part].nan_to_num()) for part in parts):
            raise UserError(f"{HEAD} differs from the embedding {self._table}, although config.json ties them",
                            where=str(self.where),
                            instead='"tie_word_embeddings": false in config.json, if the stored head is the right '
                                    f"one; or the weights without {HEAD}")

    def _refuse_others(self) -> None:
        """A tensor that ours has no place for means another model, whatever config.json says."""
        known = {stored.name for tensors in self._tensors.values() for stored in tensors}
        tied = {HEAD} if self.model.tied else set()
        for name in self._place.keys() - known - tied:
            if not name.endswith(_NO_WEIGHTS):
                raise UserError(f"the weights have a tensor {name}, which a model of this config.json has not",
                                where=str(self.where), instead="the weights that belong to this config.json")


# Write a model as a folder that transformers' AutoModelForCausalLM loads, one tensor in memory at a time.
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
            weights.check_finite()
        total = sum(_numel(tensor) for tensor in tensors) * DTYPES[dtype].itemsize
        if len(shards) > 1:
            places = {tensor.name: _name(number, len(shards)) for number, shard in enumerate(shards)
                      for tensor in shard}
            write_json(partial / "model.safetensors.index.json",
                       {"metadata": {"total_size": total}, "weight_map": places})
        end_of_text, note = write_tokenizer(entry_of(source), source.model.block_size, partial, source.folder)
        _write_config(partial, source, dtype, end_of_text)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    notes = [*weights.notes, *([] if note is None else [f"no tokenizer was written: {note}"])]
    return Exported(out, total, len(shards), tuple(notes))


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
