"""Export of a checkpoint in the format of transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ezpz_llm.core.rundir import write_json
from ezpz_llm.training.hf.config import StoredTensor, stored_tensors, to_hf
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
from ezpz_llm.training.hf.original_settings import keep_original_settings
from ezpz_llm.training.hf.source import CONFIG, Source
from ezpz_llm.training.hf.tokenizer import entry_of, write_tokenizer
from ezpz_llm.training.hf.weights import NO_TOKENIZER, Weights, open_weights
from ezpz_llm.training.model.parameters import parameter_shapes, whole_box


def export(source: Source, out: Path, *, dtype: str = "fp32", shard_bytes: float = 5e9) -> Exported:
    """Export a model, one tensor at a time, to a folder that transformers' AutoModelForCausalLM loads.

    The folder appears only when it is complete. The logits of real tokens are equal, up to the rounding of `dtype`.
    Padded vocabulary rows are omitted. For GPT-2, missing biases are written as zeros.

    Args:
        out: a new or empty folder.
        dtype: one of DTYPES.
        shard_bytes: maximum size of a weights file; a larger tensor has its own file.

    Raises:
        UserError: the checkpoint is damaged, Hugging Face has no equivalent model, `out` is not an empty folder, or
            the disk is full.
    """
    check_out(out)
    names = stored_tensors(source.model)
    with open_weights(source) as weights, new_folder(out) as folder:
        tensors = [ExportTensor(tensor.name, tensor.stored_shape, DTYPES[dtype],
                                partial(_export_values, tensor, weights, DTYPES[dtype])) for tensor in names]
        files = write_weights(folder, tensors, shard_bytes)
        kept, kept_notes = keep_original_settings(source, folder)
        context = kept.get("max_position_embeddings", source.model.block_size)
        end_of_text, note = write_tokenizer(entry_of(source), context, folder, source.folder)
        write_json(folder / CONFIG, {**to_hf(source.model, dtype=dtype_name(dtype), end_of_text=end_of_text),
                                     **kept, **make_provenance(source.folder, source.state)})
    notes = [*weights.notes, *kept_notes, *([] if note is None else [f"{NO_TOKENIZER}: {note}"])]
    return Exported(out, sum(tensor.bytes for tensor in tensors), files, tuple(notes))


def _export_values(tensor: StoredTensor, weights: Weights, dtype: torch.dtype) -> Tensor:
    if tensor.ours not in parameter_shapes(weights.model):
        return torch.zeros(tensor.stored_shape, dtype=dtype)  # a bias that the model does not have
    box = ((tensor.first, tensor.stop), *whole_box(tensor.shape[1:]))
    values = weights.read(tensor.ours, box)
    weights.check_finite()
    return (values.T if tensor.transposed else values).to(dtype)
