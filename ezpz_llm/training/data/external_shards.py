"""Shards written by other programs, read in place; a manifest with counts and hashes is kept in the cache.

    build-nanogpt    NAME_train_000001.npy …, NAME_val_000000.npy …: uint16, gpt2
    nanoGPT          train.bin, val.bin: uint16 or the declared type, gpt2; or characters, if there is a meta.pkl
    llm.c            NAME_train_000001.bin …, NAME_val_000000.bin …: uint16 or uint32 by their header, gpt2
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ezpz_llm.core.base import UserError, open_regular
from ezpz_llm.training.data.corpora import cached_folder
from ezpz_llm.training.data.downloads import print_to_stderr, progress, reading
from ezpz_llm.training.data.file_signatures import check_tokens
from ezpz_llm.training.data.manifest import COUNTS, FORMAT, TRAIN, VAL, Manifest, Shard, Source, Split, Splits
from ezpz_llm.training.data.nanogpt_meta import META_JSON, META_PKL, NanogptMeta, read_meta
from ezpz_llm.training.data.shards import open_npy
from ezpz_llm.training.data.token_width import (
    CHECKED_TOKENS,
    LLM_C_HEADER_BYTES,
    check_llm_c_size,
    check_width,
    find_llm_c_dtype,
    other_type_advice,
    pieces,
)
from ezpz_llm.training.data.tokenize_corpus import entropy
from ezpz_llm.training.data.tokenizer_files import copy_files
from ezpz_llm.training.data.tokenizers import CharTokenizer, Choice, Tokenizer, choose_tokenizer, to_entry

# The split must be a separate component of the name: "eval" is not "val".
_NAME = re.compile(rf"(?P<name>.+)_(?P<split>{TRAIN}|{VAL})(_\d+)?\.(npy|bin)")
_DEFAULT_TOKENIZER = "gpt2"
_COPY_AGAIN = "copy or download that file again"
_TOKENS_AT_ONCE = 8 << 20


@dataclass(frozen=True)
class ExternalShards:
    """Folder of another program's shards, before they are read.

    Attributes:
        written_by: name of the program.
        splits: files of each split, in order.
        tokenizer: None for the default.
    """

    folder: Path
    written_by: str
    splits: dict[str, tuple[Path, ...]]
    tokenizer: Choice | None
    meta: NanogptMeta

    @property
    def fingerprint(self) -> str:
        """Hash of the folder's path, the files' names, sizes and timestamps, and the requested tokenizer."""
        files = [path for paths in self.splits.values() for path in paths]
        files += [self.folder / name for name in (META_PKL, META_JSON) if (self.folder / name).is_file()]
        with reading(self.folder):
            stats = [(path.name, path.stat()) for path in files]
        # The table of "char" is not needed: meta.pkl, whose timestamp is included, determines it.
        choice = self.tokenizer
        tokenizer = choice and (choice.name if choice.file is None else choice.table)
        values = [str(self.folder), tokenizer, [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]]
        return hashlib.sha256(json.dumps([FORMAT, "foreign, types checked", values]).encode()).hexdigest()

    @property
    def index(self) -> Path:
        """Folder in the cache for the manifest."""
        return cached_folder(self.folder.name, self.fingerprint)


def find_external_shards(corpus: str, tokenizer: Choice | None) -> ExternalShards | None:
    """Return the shards in the folder `corpus`, or None if it has none of these programs.

    Raises:
        UserError: the training or validation split is missing.
    """
    folder = Path(corpus).expanduser().absolute()
    if not os.path.isdir(folder):
        return None
    with reading(folder):
        program, splits = "build-nanogpt", _find_splits(folder, "*.npy")
        if not any(splits.values()):
            program, splits = "llm.c", _find_splits(folder, "*.bin")
            if any(find_llm_c_dtype(path) is None for paths in splits.values() for path in paths):
                splits = {}
        if not any(splits.values()):
            program = "nanoGPT"
            splits = {name: [folder / f"{name}.bin"] * (folder / f"{name}.bin").is_file() for name in (TRAIN, VAL)}
    if not any(splits.values()):
        return None
    for name, paths in splits.items():
        if not paths:
            raise UserError(f"these {program} shards have no {name} split", where=str(folder),
                            instead=f"add the files of the {name} split")
    is_raw = program == "nanoGPT" and any(find_llm_c_dtype(paths[0]) is None for paths in splits.values())
    meta = read_meta(folder, is_raw=is_raw)
    if tokenizer is not None and tokenizer.file is None and tokenizer.name == (
            _DEFAULT_TOKENIZER if meta.characters is None else "char"):
        tokenizer = None  # the same fingerprint with and without --tokenizer
    return ExternalShards(folder, program, {name: tuple(paths) for name, paths in splits.items()}, tokenizer, meta)


def _find_splits(folder: Path, pattern: str) -> dict[str, list[Path]]:
    splits: dict[str, list[Path]] = {TRAIN: [], VAL: []}
    for path in sorted(folder.glob(pattern)):
        if match := _NAME.fullmatch(path.name):
            splits[match["split"]].append(path)
    return splits


def index_shards(shards: ExternalShards, folder: Path, show: bool) -> None:
    """Read each token of `shards` once and write their manifest to `folder`.

    Raises:
        UserError: a shard is truncated or has an unsupported data type, or an id is outside the vocabulary.
    """
    opened = {name: [_map_tokens(path, shards.meta.dtype) for path in paths]
              for name, paths in shards.splits.items()}
    tokenizer = _make_tokenizer(shards)
    tokenizer_argument = tokenizer.name if shards.tokenizer is None else shards.tokenizer.words
    dtypes = {tokens.dtype for split in opened.values() for tokens in split}
    if len(dtypes) > 1:
        raise UserError("these shards have different data types", where=str(shards.folder),
                        instead="keep only shards from one preparation in the folder")
    size = sum(tokens.nbytes for split in opened.values() for tokens in split)
    if show:
        print_to_stderr(f"reading {shards.written_by} shards once: {shards.folder}, {size / 1e6:,.1f} MB")
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    splits: dict[str, Split] = {}
    with progress(f"reading {shards.folder}", size, show) as advance:
        for name, files in opened.items():
            splits[name] = Split(sum(tokens.size for tokens in files), [
                Shard(str(tokens.filename), tokens.size, _count(tokens, tokenizer, counts, advance), tokens.offset)
                for tokens in files])
    np.save(folder / COUNTS, counts)
    if shards.tokenizer is not None and shards.tokenizer.file is not None:
        copy_files(shards.tokenizer.file, folder)
    end = tokenizer.end_of_text
    Manifest(
        request=shards.fingerprint,
        command=shlex.join(["python3", "-m", "ezpz_llm.data", "prepare", str(shards.folder), "--tokenizer",
                            tokenizer_argument]),
        written_by=shards.written_by,
        source=Source(str(shards.folder), sum(map(len, opened.values())), size),
        tokenizer=to_entry(tokenizer),
        vocab_size=tokenizer.vocab_size,
        end_of_text=end,
        dtype=dtypes.pop().name,
        documents=int(counts[end]) if end is not None else 1,
        tokens=sum(split.tokens for split in splits.values()),
        unigram_entropy=entropy(counts),
        splits=Splits(splits[TRAIN], splits[VAL]),
    ).write(folder)


def check_shards(shards: ExternalShards) -> None:
    """Check the shards' data types and a sample of up to `CHECKED_TOKENS` ids, without writing anything.

    Raises:
        UserError: for the reasons given in `index_shards`, but only for the ids in the sample.
    """
    opened = [_map_tokens(path, shards.meta.dtype) for paths in shards.splits.values() for path in paths]
    tokenizer = _make_tokenizer(shards)
    for tokens in opened:
        for first, part in pieces(tokens, CHECKED_TOKENS // len(opened)):
            _check_ids(tokens, first, part, tokenizer)


def _make_tokenizer(shards: ExternalShards) -> Tokenizer:
    if shards.meta.characters is not None:
        characters = CharTokenizer(shards.meta.characters)
        if shards.tokenizer is not None and not shards.tokenizer.fits(to_entry(characters)):
            raise UserError("these shards hold character ids, which the tokenizer "
                            f"{shards.tokenizer.describe()} did not produce", where=str(shards.folder / META_PKL),
                            instead="omit --tokenizer")
        return characters
    if shards.tokenizer is not None and shards.tokenizer.name == "char":
        raise UserError("--tokenizer char needs a table of characters, but there is no meta.pkl",
                        where=str(shards.folder), instead="if these are gpt2 tokens, omit --tokenizer")
    return (shards.tokenizer or choose_tokenizer(_DEFAULT_TOKENIZER)).load()


def _map_tokens(path: Path, declared: np.dtype | None) -> np.memmap:
    """Map the tokens of a file.

    Args:
        declared: type of raw tokens; None for uint16.
    """
    if path.suffix == ".bin":
        return _map_raw_tokens(path, declared)
    check_tokens(path)
    tokens = open_npy(path, "shard", f"{_COPY_AGAIN}; add a NumPy header to raw tokens, as written by OLMo: "
                                     "numpy.save(NEW, numpy.fromfile(FILE, 'uint16')), or uint32")
    if tokens.dtype not in (np.dtype("<u2"), np.dtype("<u4")) or tokens.ndim != 1:
        instead = "convert the shards to one-dimensional arrays of uint16 or uint32"
        if tokens.dtype.kind in "iu":
            parent = shlex.quote(str(path.parent))
            code = ("import glob, numpy as n; "
                    "[n.save('u4/' + f, n.load(f).ravel().astype('u4')) for f in glob.glob('*.npy')]")
            instead += f': mkdir {parent}/u4 && cd {parent} && python3 -c "{code}"; then pass {parent}/u4'
        raise UserError(f"this shard is a {tokens.ndim}-dimensional array of {tokens.dtype}", where=str(path),
                        instead=instead)
    return tokens


def _map_raw_tokens(path: Path, declared: np.dtype | None) -> np.memmap:
    if (dtype := find_llm_c_dtype(path)) is not None:
        offset = LLM_C_HEADER_BYTES
        check_llm_c_size(path, dtype)
    else:
        check_tokens(path)
        offset, dtype = 0, np.dtype("<u2") if declared is None else declared
        check_width(path, dtype)
    with reading(path):
        open_regular(path).close()
        try:
            return np.memmap(path, dtype, "r", offset)
        except ValueError as error:
            raise UserError(f"this shard is truncated, or not a shard: {error}", where=str(path),
                            instead=_COPY_AGAIN) from error


def _count(tokens: np.memmap, tokenizer: Tokenizer, counts: np.ndarray,
           advance: Callable[[int], None]) -> str:
    """Add the occurrences of each id to `counts` and return the file's sha256."""
    path = Path(str(tokens.filename))
    digest = hashlib.sha256()
    with reading(path), open_regular(path) as file:
        digest.update(file.read(tokens.offset))
        for first in range(0, tokens.size, _TOKENS_AT_ONCE):
            part = np.asarray(tokens[first:first + _TOKENS_AT_ONCE])
            _check_ids(tokens, first, part, tokenizer)
            counts += np.bincount(part, minlength=tokenizer.vocab_size)
            digest.update(part.data)
            advance(part.nbytes)
    return digest.hexdigest()


def _check_ids(tokens: np.memmap, first: int, part: np.ndarray, tokenizer: Tokenizer) -> None:
    """Check the ids of a part that starts at position `first`.

    Raises:
        UserError: an id is outside the vocabulary.
    """
    at = int(part.argmin() if part.min() < 0 else part.argmax())
    if not 0 <= part[at] < tokenizer.vocab_size:
        raise UserError(
            f"token {part[at]:,} at position {first + at:,} is outside the vocabulary of the "
            f"tokenizer {tokenizer.name}, which has {tokenizer.vocab_size:,} tokens", where=str(tokens.filename),
            instead="pass the tokenizer that made these shards: --tokenizer T"
                    + other_type_advice(tokens, tokenizer.vocab_size))
