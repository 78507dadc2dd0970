"""Write a safetensors file one tensor at a time, hashing it on the way.

The library's own writer wants every tensor on the host at once and hides the cause of a failed write (a full disk
is not an OSError there); the format is short: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ezpz_llm.engine.checkpoint.manifest import FileRecord

_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16",
           torch.int64: "I64", torch.uint8: "U8"}


def write_tensors(path: Path, outline: Mapping[str, torch.Tensor], tensors: Iterable[torch.Tensor],
                  metadata: Mapping[str, str] | None = None) -> FileRecord:
    """Write tensors of any device under their names, durably, each when its turn comes.

    Args:
        outline: by name, tensors of the same sizes and types in the same order; those of the meta device will do.
        metadata: what the header says of the file.

    Raises:
        OSError: the disk is full, or the like; the file is then incomplete.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in outline.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in (len(text).to_bytes(8, "little"), text):
            file.write(chunk)
            digest.update(chunk)
        for _, tensor in zip(outline, tensors, strict=True):
            data = memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
            file.write(data)
            digest.update(data)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return FileRecord(path.name, size, digest.hexdigest())
