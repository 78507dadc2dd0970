"""Export of the models in a script's checkpoint, one tensor at a time, for transformers or plain torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from ezpz_llm.core.base import join_file_name
from ezpz_llm.core.rundir import write_json
from ezpz_llm.training.checkpoint.index import BUFFER, Index, Parameter, check_coverage, read_index
from ezpz_llm.training.checkpoint.manifest import STATE, damaged_error, read_manifest, shard_name, verify
from ezpz_llm.training.checkpoint.script_model import ScriptModel, parameters_of, prefix_of
from ezpz_llm.training.checkpoint.state import State
from ezpz_llm.training.hf.export_folder import (
    DTYPES,
    Exported,
    ExportTensor,
    check_out,
    dtype_name,
    make_provenance,
    new_folder,
    write_weights,
)
from ezpz_llm.training.hf.source import CONFIG
from ezpz_llm.training.hf.weight_files import TensorFiles
from ezpz_llm.training.hf.weights import read_box
from ezpz_llm.training.model.parameters import whole_box

_GENERATION_CONFIG = "generation_config.json"


def export_script(checkpoint: Path, state: State, out: Path, *, dtype: str, shard_bytes: float) -> Exported:
    """Export the models of a script to `out`, or to a folder in it for each of several models.

    A Hugging Face model is exported with its config.json, for `from_pretrained` of its class. Any other module is
    exported as one model.safetensors, which `load_state_dict` accepts after `safetensors.torch.load_file`. Buffers
    are unchanged. The folder appears only when it is complete.

    Args:
        checkpoint: folder of the checkpoint.
        state: content of its state.json.
        out: a new or empty folder.
        dtype: dtype of the parameters, one of DTYPES.
        shard_bytes: maximum size of a weights file of a Hugging Face model.

    Raises:
        UserError: the checkpoint is damaged, `out` is not an empty folder, or the disk is full.
    """
    check_out(out)
    verify(checkpoint, read_manifest(checkpoint))
    index = read_index(checkpoint)
    check_coverage(index, checkpoint)
    total, count = 0, 0
    notes: list[str] = []
    with TensorFiles(checkpoint, "pt") as files, new_folder(out) as folder:
        reader = _Reader(checkpoint, index, files, DTYPES[dtype])
        for name, model in state.script_models.items():
            inner = join_file_name(folder, name, STATE) if name else folder
            inner.mkdir(exist_ok=True)
            tensors = list({tensor.name: tensor for tensor in reader.tensors_of(name, model)}.values())
            count += write_weights(inner, tensors, math.inf if model.config is None else shard_bytes)
            total += sum(tensor.bytes for tensor in tensors)
            if model.config is not None:
                write_json(inner / CONFIG, {**model.config, "architectures": [model.class_name],
                                            "dtype": dtype_name(dtype), **make_provenance(checkpoint, state)})
            if model.generation_config is not None:
                write_json(inner / _GENERATION_CONFIG, model.generation_config)
            notes += _notes_about(model)
    if reader.non_finite:
        notes.append(f"NaN or Inf in {_first(reader.non_finite)}")
    return Exported(out, total, count, tuple(notes))


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + " …" * (len(names) > 3)


def _notes_about(model: ScriptModel) -> Iterator[str]:
    if model.extra_state:
        yield (f"checkpoints do not contain extra state of modules ({_first(model.extra_state)}): pass "
               "strict=False to load_state_dict")
    if model.config is not None and "auto_map" in model.config:
        yield "the model has its own code (auto_map in config.json): copy its .py files to the folder"


class _Reader:
    """Reader of a checkpoint's tensors.

    Attributes:
        non_finite: names of exported parameters with NaN or Inf.
    """

    def __init__(self, folder: Path, index: Index, files: TensorFiles, dtype: torch.dtype) -> None:
        self._folder, self._index, self._files, self._dtype = folder, index, files, dtype
        self.non_finite: list[str] = []

    def tensors_of(self, name: str, model: ScriptModel) -> Iterator[ExportTensor]:
        """Yield the parameters of a model, by each of their names, and its buffers."""
        for key, parameter in parameters_of(self._index, name, model, self._folder).items():
            yield ExportTensor(key, parameter.shape, self._dtype, partial(self._read_parameter, key, parameter))
        prefix, shard = f"{BUFFER}{prefix_of(name)}", self._files.open(shard_name(0))
        for stored in shard.keys():  # noqa: SIM118 (not a mapping)
            if stored.startswith(prefix):
                buffer = shard.get_tensor(stored)
                yield ExportTensor(stored.removeprefix(prefix), tuple(buffer.shape), buffer.dtype,
                                   partial(shard.get_tensor, stored))

    def _read_parameter(self, name: str, parameter: Parameter) -> Tensor:
        try:
            values = read_box(parameter, whole_box(parameter.shape), self._files).to(self._dtype)
        except (SafetensorError, RuntimeError) as error:
            raise damaged_error(self._folder, f"{name} cannot be read: {error}") from error
        if not values.isfinite().all():
            self.non_finite.append(name)
        return values
