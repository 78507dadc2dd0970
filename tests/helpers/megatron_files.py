"""Write tokens in the format of Megatron's preprocess_data.py."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write_megatron(prefix: Path, sequences: Sequence[np.ndarray], dtype: str,
                   ends: Sequence[int] | None = None) -> Path:
    """Write PREFIX.bin and PREFIX.idx. Each sequence is a document, unless `ends` holds the bounds of documents."""
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    offsets = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]) * np.dtype(dtype).itemsize
    documents = np.arange(len(sequences) + 1) if ends is None else np.array(ends)
    prefix.with_suffix(".bin").write_bytes(np.concatenate(sequences).astype(dtype).tobytes())
    prefix.with_suffix(".idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[dtype], len(lengths), len(documents))
        + lengths.tobytes() + offsets.astype("<i8").tobytes() + documents.astype("<i8").tobytes())
    return prefix
