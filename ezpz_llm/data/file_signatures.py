"""Files that are no text, by their first bytes or their names: what each is, and what to do instead."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ezpz_llm.base import UserError, open_regular
from ezpz_llm.data.downloads import reading

_ARRAYS = ("its tokens in NAME_train_000000.npy and NAME_val_000000.npy (numpy.save, uint16 or uint32), whose "
           "folder is a corpus")
_TEXT_OR_ARRAYS = f"its text, or {_ARRAYS}"
_LLM_C = ("convert all in the folder, which then is a corpus: python3 -c \"import glob, numpy as n; "
          "[n.save(f[:-4], n.fromfile(f, '<{}', offset=1024)) for f in glob.glob('*.bin')]\"")
_LEAVE, _UNPACK = "leave it out", "unpack it, or leave it out"


class Signature(NamedTuple):
    """A format: a regular expression for the beginning of a file, or for the name of a file that is no text."""

    pattern: bytes
    what: str
    instead: str = _LEAVE


TOKENS = (
    Signature(rb"version https://git-lfs", "a Git LFS pointer, not the file itself",
              "fetch the file: git lfs pull"),
    Signature(b"\x88\xd8\x34\x01", "tokens of llm.c (uint16), not supported", _LLM_C.format("u2")),
    Signature(b"\xa1\xd9\x34\x01", "tokens of llm.c (uint32), not supported", _LLM_C.format("u4")),
    Signature(rb"LITPKDS", "a packed data set of lit-gpt, not supported", _TEXT_OR_ARRAYS),
    Signature(rb"MMIDIDX\x00\x00", "Megatron's index of tokens, supported with its tokens",
              "--corpus X for X.bin and X.idx, with --tokenizer T"),
    Signature(rb"TNTIDX\x00\x00", "an index of old Megatron or fairseq, not supported",
              "preprocess_data.py --dataset-impl mmap, whose X.bin and X.idx are --corpus X"),
)
"""Long enough that tokens do not begin so by chance."""

OTHERS = (
    *TOKENS,
    Signature(rb"\x89PNG\r\n\x1a\n", "a PNG image"),
    Signature(rb"\xff\xd8\xff", "a JPEG image"),
    Signature(rb"GIF8[79]a", "a GIF image"),
    Signature(rb"%PDF-", "a PDF document"),
    Signature(rb"\{\\rtf", "an RTF document"),
    Signature(rb"PK\x03\x04.{26}[^/]{1,200}/data\.pkl", "a file of PyTorch (.pt), not supported", _TEXT_OR_ARRAYS),
    Signature(rb"PK\x03\x04.{26}[^/]{1,200}\.npy", "several NumPy arrays (.npz), not supported", _ARRAYS),
    Signature(rb"PK(\x03\x04|\x05\x06)", "a zip archive, as .docx and .xlsx files are", _UNPACK),
    Signature(rb"\x80[\x02-\x05]", "a Python pickle, as .pkl and old .pt files are, which could run anything",
              _TEXT_OR_ARRAYS),
    Signature(rb"\x93NUMPY", "a NumPy array, supported as a folder of shards",
              "call it NAME_train_000000.npy, put NAME_val_000000.npy beside it, and name the folder"),
    Signature(rb".{6}\x00\x00\{\x22", "model weights (safetensors)"),
    Signature(rb"GGUF[\x02\x03]\x00", "a GGUF model"),
    Signature(rb"ARROW1\x00\x00|FEA1", "an Arrow file (Feather), not supported",
              "python3 -c \"import pyarrow.feather as f, pyarrow.parquet as p; "
              "p.write_table(f.read_table('FILE'), 'FILE.parquet')\""),
    Signature(rb"\xff\xff\xff\xff",
              "an Arrow stream, as save_to_disk of Hugging Face's datasets writes, not supported",
              "python3 -c \"import datasets; datasets.Dataset.from_file('FILE').to_json('FILE.jsonl')\""),
    Signature(rb"Obj\x01", "an Avro file"),
    Signature(rb"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    Signature(rb"SQLite format 3\x00", "an SQLite database"),
    Signature(rb"\x7fELF", "a program"),
    Signature(rb"\xd0\xcf\x11\xe0", "a Microsoft Office document"),
    Signature(rb"ID3[\x03\x04]", "MP3 sound"),
    Signature(rb"OggS\x00", "Ogg sound"),
    Signature(rb"fLaC\x00", "FLAC sound"),
    Signature(rb"RIFF", "a RIFF file (WAV, AVI or WebP)"),
    Signature(rb".{4}ftyp", "MP4 video or sound"),
    Signature(rb".{257}ustar", "a tar archive", _UNPACK),
    Signature(rb".{4}1AY&SY", "packed by bzip2, not supported", "bunzip2 FILE, or pack it by gzip or zstd"),
    Signature(rb"\xfd7zXZ\x00", "packed by xz, not supported", "unxz FILE, or pack it by gzip or zstd"),
    Signature(rb"\x04\x22\x4d\x18", "packed by lz4, not supported", "unlz4 FILE, or pack it by gzip or zstd"),
    Signature(rb"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    Signature(rb"Rar!\x1a\x07", "a rar archive", _UNPACK),
    Signature(rb"\x1f\x9d", "packed by compress", _UNPACK),
    Signature(rb"\x1f\x8b|\x28\xb5\x2f\xfd", "packed twice", _UNPACK),
)

_NAMES = (
    Signature(rb"chunk-\d+-\d+\.bin", "a chunk of litdata (LitGPT), not supported", _TEXT_OR_ARRAYS),
    Signature(rb".*\.mds", "a shard of MosaicML's streaming, not supported", _TEXT_OR_ARRAYS),
    Signature(rb".*\.ds(\.index)?", "tokens of datatrove (Nanotron), not supported", _TEXT_OR_ARRAYS),
    Signature(rb".*\.tfrecords?", "TFRecord, not supported", 'its text as lines like {"text": "…"}'),
    Signature(rb".*\.npy", "raw tokens without NumPy's header, as OLMo writes, not supported",
              "write the header: numpy.save('NAME_train_000000.npy', numpy.fromfile('FILE', 'uint16')), or uint32, "
              "and a NAME_val_000000.npy, and name the folder"),
    Signature(rb".*\.bin", "raw tokens or other binary data", "of nanoGPT's train.bin and val.bin name the folder, "
              f"of Megatron's X.bin and X.idx name X; else {_ARRAYS}"),
)


def find_signature(head: bytes, table: Iterable[Signature] = OTHERS) -> Signature | None:
    """The format of a file that begins with `head`."""
    return next((row for row in table if re.match(row.pattern, head, re.DOTALL)), None)


def find_binary(path: Path) -> Signature | None:
    """The format, by its name, of a file that is no text."""
    return next((row for row in _NAMES if re.fullmatch(row.pattern, path.name.encode("utf-8", "replace"))), None)


def check_tokens(path: Path) -> None:
    """Check that a file of tokens without a header is not known to be something else.

    Raises:
        UserError: it is.
    """
    with reading(path), open_regular(path) as file:
        found = find_signature(file.read(64), TOKENS)
    if found is not None:
        raise UserError(f"this file should hold tokens, but is {found.what}", where=str(path),
                        instead=found.instead)
