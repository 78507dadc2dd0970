"""Weights of a checkpoint or a Hugging Face folder, read one box of one parameter at a time.

Both are addressed by the plain model's parameters (`ezpz_llm.training.model.parameters`), so that any layout can
load any part of a model, and an export can write one tensor at a time. No process reads more than it needs.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from ezpz_llm.core.base import UserError, print_lines
from ezpz_llm.training.checkpoint.index import WEIGHT, Parameter, check_shapes, read_index
from ezpz_llm.training.checkpoint.manifest import read_manifest, verify
from ezpz_llm.training.checkpoint.reader import fill
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import raise_together, run_together
from ezpz_llm.training.hf.config import StoredTensor
from ezpz_llm.training.hf.source import Source
from ezpz_llm.training.hf.weight_files import HfTensors, NamedTensors, ScriptTensors, TensorFiles, locate_tensors
from ezpz_llm.training.model.config import HEAD, TABLE, ModelConfig
from ezpz_llm.training.model.parameters import Box, parameter_shapes, size, whole_box

_ROWS_AT_ONCE = 8192


def open_weights(source: Source, check_hashes: bool = True) -> Weights:
    """Open the weights of a source; use the result as a context manager.

    Args:
        check_hashes: first compare a checkpoint's files with its manifest.

    Raises:
        UserError: the weights are damaged, or do not fit the source's model.
    """
    if check_hashes and source.state is not None:
        verify(source.folder, read_manifest(source.folder))
    weights = _open(source)
    if isinstance(weights, _HfWeights):
        weights.check_head()
    return weights


def _open(source: Source) -> Weights:
    if source.kind == "checkpoint":
        return CheckpointWeights(source)
    return _HfWeights(source) if source.kind == "hf" else _ScriptWeights(source)


def open_for_ranks(source: Source, dist: Dist) -> Weights:
    """Open the weights on every rank; the ranks share the work of checking hashes. Collective.

    Raises:
        UserError: see `open_weights`; the same on every rank.
    """
    def opened() -> Weights:
        """Verify this rank's share of a checkpoint's files, then open the weights."""
        if source.state is not None:
            verify(source.folder, read_manifest(source.folder)[dist.rank::dist.world_size])
        return open_weights(source, check_hashes=False) if dist.is_main else _open(source)

    weights = run_together(dist, opened)
    if dist.is_main:
        for note in weights.notes:
            print_lines(f"note: {note}", file=sys.stderr)
    return weights


class Weights(ABC):
    """Weights of the plain model `model`, in the folder `where`."""

    def __init__(self, model: ModelConfig, where: Path) -> None:
        self.model, self.where = model, where
        self._files = TensorFiles(where, "pt")
        self._means: dict[str, Tensor] = {}
        self._non_finite: str | None = None
        self.notes: list[str] = []
        """Notes for the user about how the files were read."""

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.__exit__(*exception)

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a parameter, fp32 on CPU, in the shape of the box.

        Padded vocabulary rows that are not stored get the mean of the real rows. Their logits are then the mean
        logit, so their probability is at most their share of the vocabulary (Jensen's inequality). Rows of zeros
        would get most of the probability in a model whose logits are all negative, such as GPT-2.
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
        """Return the mean of a table's rows for real tokens, (C,)."""
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
            UserError: a rank has read NaN or Inf.
        """
        error = None if self._non_finite is None else UserError(
            f"the weights contain NaN or Inf in {self._non_finite}", where=str(self.where),
            instead="an earlier checkpoint; the run that saved these weights diverged, or the files are damaged")
        if dist is not None:
            raise_together(dist, error)
        elif error is not None:
            raise error

    def _note_non_finite(self, name: str, values: Tensor) -> Tensor:
        """Record the first tensor with NaN or Inf; raising here would leave other ranks waiting."""
        if self._non_finite is None and not values.isfinite().all():
            self._non_finite = name
        return values

    @abstractmethod
    def rows(self, name: str) -> int:
        """Return the number of stored rows of a parameter."""

    @abstractmethod
    def read_stored(self, name: str, box: Box) -> Tensor:
        """Return a box of the stored rows of a parameter."""


def read_box(parameter: Parameter, box: Box, files: TensorFiles) -> Tensor:
    """Assemble a box of a checkpoint's parameter from the ranks' files, fp32 on CPU, in the shape of the box."""
    result = torch.empty(size(box))
    fill({WEIGHT: result}, (box, 0, size(box)), parameter, files.open)
    return result.view([stop - start for start, stop in box])


class CheckpointWeights(Weights):
    """Weights of a checkpoint, saved under any layout."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.model, source.folder)
        index = read_index(source.folder)
        check_shapes(index, parameter_shapes(source.model), source.folder)
        self._parameters = index.parameters

    def rows(self, name: str) -> int:
        """Return the number of rows of the stored parameter `name`."""
        return self._parameters[name].shape[0]

    def read_stored(self, name: str, box: Box) -> Tensor:
        """Assemble the box of a parameter from the ranks' files, in fp32."""
        return self._note_non_finite(name, read_box(self._parameters[name], box, self._files))


class _HfWeights(Weights):
    """Weights of a Hugging Face model, in safetensors of any floating-point dtype."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.model, source.folder)
        self._tensors = self._list_tensors(source)
        self._found = locate_tensors(source.model, self._tensors)
        self.notes += self._found.notes

    def _list_tensors(self, source: Source) -> NamedTensors:
        return HfTensors(self._files)

    def rows(self, name: str) -> int:
        """Return the number of rows of the parameter `name`, over all its tensors."""
        return self._found.tensors[name][-1].stop

    def read_stored(self, name: str, box: Box) -> Tensor:
        """Assemble the box of a parameter from its Hugging Face tensors, in fp32."""
        parts = []
        for stored in self._found.tensors[name]:
            first, stop = max(box[0][0], stored.first), min(box[0][1], stored.stop)
            if first < stop:
                sides = (slice(first - stored.first, stop - stored.first), *(slice(*side) for side in box[1:]))
                parts.append(self._note_non_finite(stored.name, self._read(stored, sides).float()))
        return torch.cat(parts)

    def _read(self, stored: StoredTensor, sides: tuple[slice, ...]) -> Tensor:
        file, name = self._found.files[stored.name]
        if stored.transposed:
            return self._read_slice(file, name, sides[::-1]).T
        return self._read_slice(file, name, sides)

    def _read_slice(self, file: str, name: str, sides: tuple[slice, ...]) -> Tensor:
        return self._files.open(file).get_slice(name)[sides]

    def check_head(self) -> None:
        """Check that a stored head equals the embedding that it is tied to.

        Raises:
            UserError: it differs; transformers would then use both, without tying them.
        """
        if not self.model.tied or HEAD not in self._found.files:
            return
        head, table = self._found.files[HEAD], self._found.files[self._found.table]
        shape = self._tensors.shape(*table)
        parts = (slice(first, first + _ROWS_AT_ONCE) for first in range(0, shape[0], _ROWS_AT_ONCE))
        # NaN does not equal itself; `check_finite` reports it with a clearer message.
        if self._tensors.shape(*head) != shape or not all(
                torch.equal(self._read_slice(*head, (part,)).nan_to_num(),
                            self._read_slice(*table, (part,)).nan_to_num()) for part in parts):
            raise UserError(f"{HEAD} differs from the embedding {self._found.table}, although config.json ties "
                            "them", where=str(self.where),
                            instead='set "tie_word_embeddings": false in config.json if the stored head is right, '
                                    f"or use weights without {HEAD}")


class _ScriptWeights(_HfWeights):
    """Weights of a Hugging Face model in a checkpoint of a script."""

    def _list_tensors(self, source: Source) -> NamedTensors:
        tensors = ScriptTensors(source)
        self._parameters = tensors.parameters
        return tensors

    def _read_slice(self, file: str, name: str, sides: tuple[slice, ...]) -> Tensor:
        parameter = self._parameters[name]
        bounds = [side.indices(length)[:2] for side, length in zip(sides, parameter.shape, strict=False)]
        return read_box(parameter, (*bounds, *whole_box(parameter.shape[len(bounds):])), self._files)


NO_TOKENIZER = "no tokenizer was written"
