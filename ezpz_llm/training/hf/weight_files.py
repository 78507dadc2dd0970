"""Files of weights: open safetensors files, and the place of each tensor of a Hugging Face model.

Imports no torch, so that files that do not fit their model are found before any rank starts.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from msgspec import Struct
from safetensors import SafetensorError, safe_open

from ezpz_llm.core.base import UserError, join_file_name, open_regular, read_json
from ezpz_llm.core.base.records import as_record
from ezpz_llm.training.checkpoint.index import check_shapes, read_index
from ezpz_llm.training.checkpoint.manifest import INDEX as CHECKPOINT_INDEX
from ezpz_llm.training.checkpoint.script_model import parameters_of
from ezpz_llm.training.hf.config import StoredTensor, stored_tensors
from ezpz_llm.training.hf.source import Source, adapter_error, export_advice
from ezpz_llm.training.model.config import HEAD, TABLE, ModelConfig
from ezpz_llm.training.model.parameters import parameter_shapes

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_WRAPPERS = {"_orig_mod", "module", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Name components that torch.compile, DDP, Fabric, FSDP, and activation checkpointing add."""
# Masks and RoPE frequencies that older versions of transformers stored with the weights.
_IGNORED_SUFFIXES = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


class TensorFiles:
    """Safetensors files of a folder, each opened and memory-mapped on first use. Use it as a context manager.

    Args:
        framework: "pt" to read torch tensors; "numpy" to read only names and shapes.
    """

    def __init__(self, folder: Path, framework: Literal["pt", "numpy"]) -> None:
        self.folder, self._framework = folder, framework
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def open(self, name: str) -> Any:
        """Return an open file.

        Raises:
            UserError: it is missing, or not a safetensors file.
        """
        if name not in self._files:
            try:
                open_regular(self.folder / name).close()
                file = safe_open(self.folder / name, framework=self._framework)
                self._files[name] = self._stack.enter_context(file)
            except (UserError, OSError, SafetensorError) as error:
                reason = error.found if isinstance(error, UserError) else error
                raise UserError(f"{name} cannot be read: {reason}", where=str(self.folder)) from error
        return self._files[name]


class NamedTensors(Protocol):
    """Tensors of a Hugging Face model in a folder, each identified by (file, stored name).

    Attributes:
        config: source of the model's settings, for messages.
        instead: advice if the tensors do not fit the settings.
    """

    folder: Path
    config: str
    instead: str

    def names(self, notes: list[str]) -> list[tuple[str, str]]:
        """Return (file, stored name) of each tensor; append notes for the user to `notes`."""

    def shape(self, file: str, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""


class HfTensors:
    """Tensors of a Hugging Face folder."""

    config, instead = "this config.json", "the weights that belong to this config.json"

    def __init__(self, files: TensorFiles) -> None:
        self.folder, self._files = files.folder, files

    def names(self, notes: list[str]) -> list[tuple[str, str]]:
        """Return (file, name) of each tensor, from the files that transformers would load."""
        return _stored_names(self._files, notes)

    def shape(self, file: str, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._files.open(file).get_slice(name).get_shape())


class ScriptTensors:
    """Parameters of the only model in a script's checkpoint. Each is in pieces in several files.

    Attributes:
        parameters: the parameters by each of their names.
    """

    config = "the script's model.config"

    def __init__(self, source: Source) -> None:
        assert source.state is not None
        ((name, model),) = source.state.script_models.items()
        self.folder, self.instead = source.folder, export_advice(source.folder)
        self.parameters = parameters_of(read_index(source.folder), name, model, source.folder)

    def names(self, notes: list[str]) -> list[tuple[str, str]]:
        """Return (index file, name) of each parameter."""
        return [(CHECKPOINT_INDEX, name) for name in self.parameters]

    def shape(self, file: str, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter."""
        return self.parameters[name].shape


@dataclass
class Locations:
    """Places of a Hugging Face model's tensors.

    Attributes:
        files: (file, stored name) of each tensor, by its name with the base model's prefix.
        tensors: tensors of each parameter of the plain model.
        notes: notes for the user about how the files are read.
    """

    files: dict[str, tuple[str, str]] = field(default_factory=dict)
    tensors: dict[str, list[StoredTensor]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def table(self) -> str:
        """Stored name of the embedding."""
        return self.tensors[TABLE][0].name


def check_weight_files(source: Source) -> None:
    """Check that the weights' names and shapes are those of their model, without reading the weights.

    Raises:
        UserError: a file or tensor is missing, or a name or shape differs.
    """
    if source.kind == "checkpoint":
        check_shapes(read_index(source.folder), parameter_shapes(source.model), source.folder)
        return
    if source.kind == "script":
        locate_tensors(source.model, ScriptTensors(source))
        return
    with TensorFiles(source.folder, "numpy") as files:
        locate_tensors(source.model, HfTensors(files))


def locate_tensors(model: ModelConfig, files: NamedTensors) -> Locations:
    """Find all tensors of a Hugging Face model.

    Raises:
        UserError: a file or tensor is missing, unknown or stored twice, or a shape differs.
    """
    found = Locations()
    for stored in stored_tensors(model):
        found.tensors.setdefault(stored.ours, []).append(stored)
    _find_tensors(model, files, found)
    for tensors in found.tensors.values():
        for stored in tensors:
            _check_shape(stored, files, found)
    _reject_unknown_tensors(model, files, found)
    return found


def _find_tensors(model: ModelConfig, files: NamedTensors, found: Locations) -> None:
    prefix = "transformer." if model.position == "learned" else "model."
    wrappers: set[str] = set()
    for file, name in files.names(found.notes):
        if ".lora_" in name:
            raise adapter_error(files.folder)
        parts = name.split(".")
        wrappers.update(_WRAPPERS.intersection(parts))
        plain = ".".join(part for part in parts if part not in _WRAPPERS)
        full = plain if plain == HEAD or plain.startswith(prefix) else prefix + plain
        if full in found.files:
            other_file, other = found.files[full]
            raise UserError(f"the weights have the tensor {full} twice: {other} in {other_file}, {name} in {file}",
                            where=str(files.folder), instead="weights that have it once")
        found.files[full] = (file, name)
    if wrappers:
        found.notes.append(f"ignoring {', '.join(sorted(wrappers))}, which model wrappers add, in the names of "
                           "the weights")
    if model.tied and HEAD in found.files and found.table not in found.files:
        found.files[found.table] = found.files.pop(HEAD)  # as transformers does


def _stored_names(files: TensorFiles, notes: list[str]) -> list[tuple[str, str]]:
    """Return (file, name) of each stored tensor, from the files that transformers would load."""
    folder = files.folder
    present = [name for name in (_SINGLE, _INDEX, *_PICKLED) if (folder / name).is_file()]
    if not present or present[0] in _PICKLED:
        raise UserError(f"there is neither {_SINGLE} nor {_INDEX}", where=str(folder),
                        instead="use a checkpoint in safetensors, or convert pytorch_model.bin (which requires "
                                "unpickling) with transformers' save_pretrained")
    if len(present) > 1:
        notes.append(f"{folder} has {' and '.join(present)}: using {present[0]}, as transformers does")
    if present[0] == _SINGLE:
        return [(_SINGLE, name) for name in files.open(_SINGLE).keys()]  # noqa: SIM118 (not a mapping)
    where = str(folder / _INDEX)
    index = as_record(_IndexFile, read_json(folder / _INDEX), where)
    names = sorted({join_file_name(folder, file, where).name for file in index.weight_map.values()})
    stored = [(file, name) for file in names for name in files.open(file).keys()]  # noqa: SIM118
    pairs = set(stored)
    for name, file in index.weight_map.items():
        if (file, name) not in pairs:
            raise UserError(f"{file} has no tensor {name}, which {_INDEX} lists", where=str(folder),
                            instead="the index that belongs to these files")
    return stored


class _IndexFile(Struct, frozen=True):
    weight_map: dict[str, str]


def _check_shape(stored: StoredTensor, files: NamedTensors, found: Locations) -> None:
    if stored.name not in found.files:
        tie = ", or set tie_word_embeddings to true there if the head is the embedding"
        raise UserError(f"the weights have no tensor {stored.name}", where=str(files.folder),
                        instead=files.instead + tie * (stored.ours == HEAD))
    file, name = found.files[stored.name]
    shape = files.shape(file, name)
    if shape != stored.stored_shape:
        raise UserError(f"{stored.name} is {list(shape)} in the weights, but "
                        f"{list(stored.stored_shape)} according to {files.config}", where=str(files.folder),
                        instead=files.instead)


def _reject_unknown_tensors(model: ModelConfig, files: NamedTensors, found: Locations) -> None:
    """Raise an error for an unknown tensor: the model differs from config.json."""
    known = {stored.name for tensors in found.tensors.values() for stored in tensors}
    tied = {HEAD} if model.tied else set()
    for name in found.files.keys() - known - tied:
        if not name.endswith(_IGNORED_SUFFIXES):
            raise UserError(f"the weights have a tensor {name}, which the model of {files.config} does not have",
                            where=str(files.folder), instead=files.instead)
