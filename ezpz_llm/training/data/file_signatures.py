"""Signatures of files that users pass as training text by mistake: first bytes or names, and advice.

Other binary files, such as images, are rejected as text that is not UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ezpz_llm.core.base import UserError, open_regular
from ezpz_llm.training.data.downloads import reading

_ARRAYS = ("save its tokens as NAME_train_000000.npy and NAME_val_000000.npy (numpy.save, uint16 or uint32), and "
           "pass their folder as the corpus")
_TEXT_OR_ARRAYS = f"use its text, or {_ARRAYS}"
_LLM_C = "name them NAME_train_000001.bin and NAME_val_000000.bin, and pass their folder as the corpus"
_REMOVE, _UNPACK_OR_REMOVE = "remove it from the corpus", "unpack it, or remove it from the corpus"


class Signature(NamedTuple):
    """File format, recognized by a regular expression for its first bytes or for its files' names."""

    pattern: bytes
    what: str
    instead: str = _REMOVE


TOKENS = (
    Signature(rb"version https://git-lfs", "a Git LFS pointer, not the file itself",
              "download the file: git lfs pull"),
    Signature(b"\x88\xd8\x34\x01", "llm.c tokens (uint16), supported only in a folder of shards", _LLM_C),
    Signature(b"\xa1\xd9\x34\x01", "llm.c tokens (uint32), supported only in a folder of shards", _LLM_C),
    Signature(rb"LITPKDS", "a packed lit-gpt data set, not supported", _TEXT_OR_ARRAYS),
    Signature(rb"MMIDIDX\x00\x00", "a Megatron index, supported together with its tokens",
              "for X.bin and X.idx, pass --corpus X and --tokenizer T"),
    Signature(rb"TNTIDX\x00\x00", "an index of old Megatron or fairseq, not supported",
              "run preprocess_data.py --dataset-impl mmap; for its X.bin and X.idx, pass --corpus X"),
)
"""Signatures that are too long to occur by chance at the start of raw tokens."""

SIGNATURES = (
    *TOKENS,
    # These two may consist of ASCII characters only.
    Signature(rb"%PDF-", "a PDF document"),
    Signature(rb"\{\\rtf", "an RTF document"),
    Signature(rb"PK\x03\x04.{26}[^/]{1,200}/data\.pkl", "a PyTorch file (.pt), not supported", _TEXT_OR_ARRAYS),
    Signature(rb"PK\x03\x04.{26}[^/]{1,200}\.npy", "several NumPy arrays (.npz), not supported", _ARRAYS),
    Signature(rb"PK(\x03\x04|\x05\x06)", "a zip archive, as .docx and .xlsx files are", _UNPACK_OR_REMOVE),
    Signature(rb"\x80[\x02-\x05]", "a Python pickle (.pkl or old .pt), which could run arbitrary code",
              _TEXT_OR_ARRAYS),
    Signature(rb"\x93NUMPY", "a NumPy array, supported only in a folder of shards",
              "rename it to NAME_train_000000.npy, add NAME_val_000000.npy, and pass the folder"),
    Signature(rb"ARROW1\x00\x00|FEA1", "an Arrow file (Feather), not supported",
              "python3 -c \"import pyarrow.feather as f, pyarrow.parquet as p; "
              "p.write_table(f.read_table('FILE'), 'FILE.parquet')\""),
    Signature(rb"\xff\xff\xff\xff",
              "an Arrow stream, as written by save_to_disk of Hugging Face datasets, not supported",
              "python3 -c \"import datasets; datasets.Dataset.from_file('FILE').to_json('FILE.jsonl')\""),
    Signature(rb".{257}ustar", "a tar archive", _UNPACK_OR_REMOVE),
    Signature(rb".{4}1AY&SY", "bzip2-compressed, not supported", "bunzip2 FILE, or compress it with gzip or zstd"),
    Signature(rb"\xfd7zXZ\x00", "xz-compressed, not supported", "unxz FILE, or compress it with gzip or zstd"),
    Signature(rb"\x1f\x8b|\x28\xb5\x2f\xfd", "compressed twice", _UNPACK_OR_REMOVE),
)

_NAMES = (
    Signature(rb"chunk-\d+-\d+\.bin", "a litdata chunk (LitGPT), not supported", _TEXT_OR_ARRAYS),
    Signature(rb".*\.mds", "a MosaicML Streaming shard, not supported", _TEXT_OR_ARRAYS),
    Signature(rb".*\.ds(\.index)?", "datatrove tokens (Nanotron), not supported", _TEXT_OR_ARRAYS),
    Signature(rb".*\.tfrecords?", "TFRecord, not supported", 'write its text as lines like {"text": "…"}'),
    Signature(rb".*\.npy", "raw tokens without a NumPy header, as written by OLMo, not supported",
              "add the header: numpy.save('NAME_train_000000.npy', numpy.fromfile('FILE', 'uint16')), or uint32; "
              "do the same for NAME_val_000000.npy, and pass the folder"),
    Signature(rb".*\.bin", "raw tokens or other binary data", "for nanoGPT's train.bin and val.bin, pass the "
              f"folder; for Megatron's X.bin and X.idx, pass X; otherwise {_ARRAYS}"),
)


def find_signature(head: bytes, table: Iterable[Signature] = SIGNATURES) -> Signature | None:
    """Return the signature that matches the first bytes of a file, or None."""
    return next((row for row in table if re.match(row.pattern, head, re.DOTALL)), None)


def find_signature_by_name(path: Path) -> Signature | None:
    """Return the signature that matches the name of a binary file, or None."""
    return next((row for row in _NAMES if re.fullmatch(row.pattern, path.name.encode("utf-8", "replace"))), None)


def check_tokens(path: Path) -> None:
    """Reject a file of raw tokens whose first bytes match another format.

    Raises:
        UserError: the file has another format.
    """
    with reading(path), open_regular(path) as file:
        signature = find_signature(file.read(64), TOKENS)
    if signature is not None:
        raise UserError(f"this file should contain tokens, but is {signature.what}", where=str(path),
                        instead=signature.instead)
