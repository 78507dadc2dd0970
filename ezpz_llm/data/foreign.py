"""Shards that other programs wrote, read where they lie: counted and hashed once, into a manifest in the cache.

    build-nanogpt    NAME_train_000001.npy …, NAME_val_000000.npy …: uint16, gpt2
    nanoGPT          train.bin, val.bin: uint16, gpt2; or characters, where a meta.pkl lists them
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ezpz_llm.base import UserError, open_regular
from ezpz_llm.data.corpora import cached_folder
from ezpz_llm.data.downloads import progress, reading, say
from ezpz_llm.data.file_signatures import check_tokens
from ezpz_llm.data.manifest import COUNTS, FORMAT, MANIFEST, TRAIN, VAL
from ezpz_llm.data.shards import open_npy
from ezpz_llm.data.token_width import CHECKED_TOKENS, check_uint16, other_type, pieces
from ezpz_llm.data.tokenize_corpus import entropy
from ezpz_llm.data.tokenizer_files import copy_files
from ezpz_llm.data.tokenizers import CharTokenizer, Choice, Tokenizer, choose, to_entry
from ezpz_llm.rundir import write_json

# The split is a whole part of the name: "eval" is not "val".
_NPY = re.compile(rf"(?P<name>.+)_(?P<split>{TRAIN}|{VAL})(_\d+)?\.npy")
_META = "meta.pkl"
_DEFAULT = "gpt2"
_AT_ONCE = 8 << 20


@dataclass(frozen=True)
class ForeignShards:
    """A folder of another program's shards, not yet read.

    Attributes:
        written_by: the program.
        splits: the files of each split, in order.
    """

    folder: Path
    written_by: str
    splits: dict[str, tuple[Path, ...]]
    tokenizer: Choice | None

    @property
    def fingerprint(self) -> str:
        """Tells these files in their present state, and the tokenizer asked for, from any others."""
        files = [path for paths in self.splits.values() for path in paths]
        if (self.folder / _META).is_file():
            files.append(self.folder / _META)
        with reading(self.folder):
            stats = [(path.name, path.stat()) for path in files]
        # Which table of characters it is, the shards say themselves.
        asked = self.tokenizer and (self.tokenizer.name if self.tokenizer.file is None else self.tokenizer.table)
        known = [str(self.folder), asked, [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]]
        return hashlib.sha256(json.dumps([FORMAT, "foreign, types checked", known]).encode()).hexdigest()

    @property
    def index(self) -> Path:
        """The folder of the cache that their manifest goes to."""
        return cached_folder(self.folder.name, self.fingerprint)


def find_foreign(corpus: str, tokenizer: Choice | None) -> ForeignShards | None:
    """The shards in the folder `corpus`, if that is one of another program's.

    Raises:
        UserError: there is no validation split, or no training split.
    """
    folder = Path(corpus).expanduser().absolute()
    if not os.path.isdir(folder):
        return None
    splits: dict[str, list[Path]] = {TRAIN: [], VAL: []}
    with reading(folder):
        for path in sorted(folder.glob("*.npy")):
            if match := _NPY.fullmatch(path.name):
                splits[match["split"]].append(path)
        written_by = "build-nanogpt"
        if not any(splits.values()):
            written_by = "nanoGPT"
            splits = {name: [folder / f"{name}.bin"] * (folder / f"{name}.bin").is_file() for name in (TRAIN, VAL)}
    if not any(splits.values()):
        return None
    for name, paths in splits.items():
        if not paths:
            raise UserError(f"these shards of {written_by} have no {name} split", where=str(folder),
                            instead=f"put the files of the {name} split there, too")
    if tokenizer is not None and tokenizer.file is None and tokenizer.name == (
            "char" if (folder / _META).is_file() else _DEFAULT):
        tokenizer = None  # so that they are read once, whether or not it was typed
    return ForeignShards(folder, written_by, {name: tuple(paths) for name, paths in splits.items()}, tokenizer)


def index_shards(shards: ForeignShards, folder: Path, show: bool) -> None:
    """Write the manifest of `shards` into `folder`; each token is read once.

    Raises:
        UserError: a shard is truncated or of another type, or has ids that the tokenizer does not know.
    """
    opened = {name: [_open(path) for path in paths] for name, paths in shards.splits.items()}
    tokenizer = _tokenizer(shards)
    asked = tokenizer.name if shards.tokenizer is None else shards.tokenizer.words
    dtypes = {tokens.dtype for split in opened.values() for tokens in split}
    if len(dtypes) > 1:
        raise UserError("these shards are of several types", where=str(shards.folder),
                        instead="keep the shards of one preparation in a folder")
    size = sum(tokens.nbytes for split in opened.values() for tokens in split)
    if show:
        say(f"reading the shards of {shards.written_by} once: {shards.folder}, {size / 1e6:,.1f} MB")
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    splits: dict[str, Any] = {}
    with progress(f"reading {shards.folder}", size, show) as advance:
        for name, files in opened.items():
            splits[name] = {"tokens": sum(tokens.size for tokens in files), "shards": []}
            for tokens in files:
                entry = {"file": str(tokens.filename), "tokens": tokens.size, "offset": tokens.offset,
                         "sha256": _count(tokens, tokenizer, counts, advance)}
                splits[name]["shards"].append(entry)
    np.save(folder / COUNTS, counts)
    if shards.tokenizer is not None and shards.tokenizer.file is not None:
        copy_files(shards.tokenizer.file, folder)
    end = tokenizer.end_of_text
    write_json(folder / MANIFEST, {
        "format": FORMAT,
        "request": shards.fingerprint,
        "command": shlex.join(["python3", "-m", "ezpz_llm.data", "prepare", str(shards.folder), "--tokenizer",
                               asked]),
        "written_by": shards.written_by,
        "source": {"corpus": str(shards.folder), "files": sum(map(len, opened.values())), "bytes": size},
        "tokenizer": to_entry(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": end,
        "dtype": dtypes.pop().name,
        "documents": int(counts[end]) if end is not None else 1,
        "tokens": sum(split["tokens"] for split in splits.values()),
        "unigram_entropy": entropy(counts),
        "splits": splits,
    })


def check_shards(shards: ForeignShards) -> None:
    """Check the shards' types, and as many ids as can be read at once, without writing anything.

    Raises:
        UserError: as `index_shards`; a token that is not looked at may still be beyond the vocabulary.
    """
    opened = [_open(path) for paths in shards.splits.values() for path in paths]
    tokenizer = _tokenizer(shards)
    for tokens in opened:
        for first, part in pieces(tokens, CHECKED_TOKENS // len(opened)):
            _check_ids(tokens, first, part, tokenizer)


def _tokenizer(shards: ForeignShards) -> Tokenizer:
    meta = shards.folder / _META
    found: Tokenizer | None = None
    if meta.is_file():
        found = CharTokenizer(_characters(meta))
        if shards.tokenizer is not None and not shards.tokenizer.fits(to_entry(found)):
            raise UserError(f"these tokens are characters, not of the tokenizer {shards.tokenizer.describe()}",
                            where=str(meta), instead="leave --tokenizer out")
    elif shards.tokenizer is not None and shards.tokenizer.name == "char":
        raise UserError("which characters these tokens are is not known: there is no meta.pkl",
                        where=str(shards.folder), instead="leave --tokenizer out if they are gpt2's")
    return found or (shards.tokenizer or choose(_DEFAULT)).make()


class _PlainUnpickler(pickle.Unpickler):
    """Loads numbers, strings, lists and dicts; what would import or call anything is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _characters(meta: Path) -> str:
    """The table in nanoGPT's meta.pkl."""
    try:
        with reading(meta), open_regular(meta) as file:
            table = _PlainUnpickler(file).load()["itos"]
        characters = [table[number] for number in range(len(table))]
        if characters != sorted(set(characters)) or {*map(len, characters)} != {1}:
            raise ValueError("its symbols are not characters in code point order")
    except (pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError, EOFError, OverflowError,
            MemoryError) as error:
        raise UserError(f"this meta.pkl has no table of characters that can be used: {error}", where=str(meta),
                        instead="prepare the text itself: python3 -m ezpz_llm.data prepare FILE --tokenizer char",
                        ) from error
    return "".join(characters)


def _open(path: Path) -> np.memmap:
    """The tokens of one file."""
    again = "copy or fetch that file again"
    check_tokens(path)
    if path.suffix == ".npy":
        tokens = open_npy(path, "shard", f"{again}; raw tokens without NumPy's header, as OLMo writes, need one: "
                                         "numpy.save(NEW, numpy.fromfile(FILE, 'uint16')), or uint32")
    else:
        check_uint16(path)
        with reading(path):
            open_regular(path).close()
            try:
                tokens = np.memmap(path, "<u2", "r")
            except ValueError as error:
                raise UserError(f"this shard is truncated, or no shard: {error}", where=str(path),
                                instead=again) from error
    if tokens.dtype not in (np.dtype("<u2"), np.dtype("<u4")) or tokens.ndim != 1:
        instead = "shards of uint16 or uint32 in one dimension"
        if tokens.dtype.kind in "iu":
            place = shlex.quote(str(path.parent))
            code = ("import glob, numpy as n; "
                    "[n.save('u4/' + f, n.load(f).ravel().astype('u4')) for f in glob.glob('*.npy')]")
            instead += f': mkdir {place}/u4 && cd {place} && python3 -c "{code}", and name {place}/u4'
        raise UserError(f"this shard holds {tokens.dtype} in {tokens.ndim} dimensions", where=str(path),
                        instead=instead)
    return tokens


def _count(tokens: np.memmap, tokenizer: Tokenizer, counts: np.ndarray,
           advance: Callable[[int], None]) -> str:
    """Add to `counts` how often each id occurs; returns the file's sha256."""
    path = Path(str(tokens.filename))
    digest = hashlib.sha256()
    with reading(path), open_regular(path) as file:
        digest.update(file.read(tokens.offset))
        for first in range(0, tokens.size, _AT_ONCE):
            part = np.asarray(tokens[first:first + _AT_ONCE])
            _check_ids(tokens, first, part, tokenizer)
            counts += np.bincount(part, minlength=tokenizer.vocab_size)
            digest.update(part.data)
            advance(part.nbytes)
    return digest.hexdigest()


def _check_ids(tokens: np.memmap, first: int, part: np.ndarray, tokenizer: Tokenizer) -> None:
    """Check the ids of a part that begins at token `first`.

    Raises:
        UserError: one is beyond the vocabulary.
    """
    if part.max() >= tokenizer.vocab_size:
        raise UserError(
            f"token {part.max():,} at place {first + int(part.argmax()):,}: the tokenizer {tokenizer.name} "
            f"has only {tokenizer.vocab_size:,}", where=str(tokens.filename),
            instead="name the tokenizer that made these shards with --tokenizer"
                    + other_type(tokens, tokenizer.vocab_size))
