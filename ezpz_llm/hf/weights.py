"""Weights of a checkpoint or a Hugging Face folder, read one box of one parameter at a time.

Both speak of the plain model's parameters (`ezpz_llm.model.parameters`), so that any layout can fill any part of a
model with them and an export can write them tensor by tensor: nobody holds more than what is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ezpz_llm.base.errors import UserError
from ezpz_llm.base.outside import file_in, read_json
from ezpz_llm.base.schema import as_dataclass
from ezpz_llm.checkpoint.index import WEIGHT, check_shapes, read_index
from ezpz_llm.checkpoint.manifest import read_manifest, verify
from ezpz_llm.checkpoint.reader import fill
from ezpz_llm.dist import Dist
from ezpz_llm.dist.agree import together
from ezpz_llm.hf.config import Stored, stored_tensors
from ezpz_llm.hf.source import Source
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.parameters import HEAD, TABLE, Box, parameter_shapes, size

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
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
    return HfWeights(source) if source.kind == "hf" else CheckpointWeights(source, check_hashes)


def open_for_ranks(source: Source, dist: Dist) -> Weights:
    """The same on every rank, which share the work of comparing hashes. Collective.

    Raises:
        UserError: the same on every rank.
    """
    def opened() -> Weights:
        if source.kind == "checkpoint":
            verify(source.folder, read_manifest(source.folder)[dist.rank::dist.world_size])
        return open_weights(source, check_hashes=False)

    return together(dist, opened)


class Weights(ABC):
    """Weights of the plain model `model`."""

    def __init__(self, model: ModelConfig, where: Path) -> None:
        self.model, self.where = model, where
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._means: dict[str, Tensor] = {}

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
                self._files[name] = self._stack.enter_context(safe_open(self.where / name, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise UserError(f"{name} cannot be read: {error}", where=str(self.where)) from error
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
        return self._parameters[name].shape[0]

    def read_stored(self, name: str, box: Box) -> Tensor:
        result = torch.empty(size(box))
        fill({WEIGHT: result}, (box, 0, size(box)), self._parameters[name], self.open)
        return result.view([stop - start for start, stop in box])


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
        return self._tensors[name][-1].stop

    def read_stored(self, name: str, box: Box) -> Tensor:
        parts = []
        for stored in self._tensors[name]:
            first, stop = max(box[0][0], stored.first), min(box[0][1], stored.stop)
            if first < stop:
                sides = (slice(first - stored.first, stop - stored.first), *(slice(*side) for side in box[1:]))
                parts.append(self._read(stored, sides).float())
        return torch.cat(parts)

    def _read(self, stored: Stored, sides: tuple[slice, ...]) -> Tensor:
        tensor = self.open(self._place[stored.name][0]).get_slice(self._place[stored.name][1])
        return tensor[sides[::-1]].T if stored.transposed else tensor[sides]

    def _find_tensors(self) -> dict[str, tuple[str, str]]:
        """By the name with the base model's prefix: the file, and the name in it."""
        prefix = "transformer." if self.model.position == "learned" else "model."
        where = {}
        for file, name in self._stored_names():
            full = name if name == HEAD or name.startswith(prefix) else prefix + name
            where[full] = (file, name)
        return where

    def _stored_names(self) -> list[tuple[str, str]]:
        if (self.where / _INDEX).is_file():
            where = str(self.where / _INDEX)
            index = as_dataclass(_IndexFile, read_json(self.where / _INDEX), where, drop_unknown=True)
            return [(file_in(self.where, file, where).name, name) for name, file in index.weight_map.items()]
        if (self.where / _SINGLE).is_file():
            return [(_SINGLE, name) for name in self.open(_SINGLE).keys()]  # noqa: SIM118 (it is no mapping)
        raise UserError(f"there is neither {_SINGLE} nor {_INDEX}", where=str(self.where),
                        instead="a checkpoint in safetensors; where there is only pytorch_model.bin, which only "
                                "unpickling reads, save it again with transformers' save_pretrained")

    def _check(self, stored: Stored) -> None:
        if stored.name not in self._place:
            raise UserError(f"the weights have no tensor {stored.name}", where=str(self.where),
                            instead="the weights that belong to this config.json")
        file, name = self._place[stored.name]
        try:
            found = tuple(self.open(file).get_slice(name).get_shape())
        except SafetensorError as error:
            raise UserError(f"{file} has no tensor {name}, which {_INDEX} says is there",
                            where=str(self.where)) from error
        if found != stored.stored_shape:
            raise UserError(f"{stored.name} is {list(found)} in the weights, by config.json "
                            f"{list(stored.stored_shape)}", where=str(self.where),
                            instead="the weights that belong to this config.json")

    def _refuse_others(self) -> None:
        """A tensor that ours has no place for means another model, whatever config.json says."""
        known = {stored.name for tensors in self._tensors.values() for stored in tensors}
        tied = {HEAD} if self.model.tied else set()
        for name in self._place.keys() - known - tied:
            if not name.endswith(_NO_WEIGHTS):
                raise UserError(f"the weights have a tensor {name}, which a model of this config.json has not",
                                where=str(self.where), instead="the weights that belong to this config.json")
