"""Tokenizers in files: a tokenizer.json of Hugging Face tokenizers, a SentencePiece *.model, or Llama 3's.

The library determines the ids. Folders of shards, runs and exports keep a copy of the files, under the names that
transformers uses. A manifest entry (see `ezpz_llm.training.data.manifest`) records the library and a hash of the
table, so that a copy can be checked wherever it is.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tiktoken

from ezpz_llm.core.base import MAX_IDS, UserError, import_package, open_regular, read_bytes, read_json
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training.data.downloads import reading
from ezpz_llm.training.data.manifest import TokenizerEntry
from ezpz_llm.training.data.text import find_checked_cut, replace_surrogates

_TOKENIZER_JSON, _TOKENIZER_MODEL = "tokenizer.json", "tokenizer.model"
KINDS = {"tokenizers": _TOKENIZER_JSON, "sentencepiece": _TOKENIZER_MODEL, "tiktoken": _TOKENIZER_MODEL}
"""File name of the copy of a tokenizer, by library (also the name of its package, and of our extra if any)."""
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""Further tokenizer files in a model's folder, for transformers."""
_END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Names of the end-of-text token to try, in order, if tokenizer_config.json names no token of the vocabulary."""
_CONFIG = COMPANIONS[0]
_MODELS = (_TOKENIZER_MODEL, "spiece.model", "sentencepiece.bpe.model")
_KNOWN = (_TOKENIZER_JSON, *_MODELS)
"""File names that only the folder of a single tokenizer contains; its name is that tokenizer's name."""
_MAX_BYTES = 256 << 20
"""Size limit of a tokenizer's file; the largest known has 33 MB."""
_IGNORED_KEYS = ("version", "truncation", "padding", "post_processor")
"""Keys of a tokenizer.json that do not affect a document's ids; transformers changes some of them on save."""
_RANK = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
"""First line of a file of tiktoken ranks: a token in base64 and its rank."""
_RANK_BYTES = 256
"""Maximum length of such a line: the longest in Llama 3 has 179."""
_LLAMA3_SHA256 = "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"
"""Hash of Meta's tokenizer.model, which is the same in Llama 3, 3.1, 3.2 and 3.3."""
# From llama_models/llama3/tokenizer.py; the file has only the ranks.
_LLAMA3_PIECES = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                  r"|\s*[\r\n]+|\s+(?!\S)|\s+")
_LLAMA3_TOKENS, _LLAMA3_SPECIAL_TOKENS = 128_000, 256
_LLAMA3_BEGIN_OF_TEXT, _LLAMA3_END_OF_TEXT = 128_000, 128_001


def find_file(path: Path) -> Path | None:
    """Return the tokenizer file that `path` names, or that the folder `path` contains; None if there is none."""
    if path.is_file():
        # Mistral publishes NAME.model.v1 to NAME.model.v7m1.
        return path if path.suffix == ".json" or ".model" in path.suffixes[-2:] else None
    return next((path / name for name in (_TOKENIZER_JSON, *_MODELS) if (path / name).is_file()), None)


def find_copy(folder: Path, entry: TokenizerEntry) -> Path:
    """Return the copy of a tokenizer's file in a folder of shards, or in the run of a checkpoint.

    Raises:
        UserError: no copy is found.
    """
    name = KINDS[entry.kind or ""]
    run = RunDir(folder.absolute().parent.parent).tokenizer
    for path in (folder / name, run / name):
        if path.is_file():
            return path
    raise UserError(f"the {name} of the tokenizer {entry.name}, which made these tokens, is missing",
                    where=f"{folder} and {run}",
                    instead=f"copy the {name} with the fingerprint {entry.fingerprint[:12]} to one of them, or "
                            "pass its folder: --tokenizer DIR")


def copy_files(source: Path, folder: Path) -> None:
    """Copy a tokenizer's file and its companions to `folder`.

    Args:
        source: the file, from `find_file` or `find_copy`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = KINDS[_kind(source)]
    with reading(source):
        shutil.copyfile(source, folder / name)
    for companion in (*COMPANIONS, *KINDS.values()) if source.name in _KNOWN else ():
        if companion != name and (source.parent / companion).is_file():
            with reading(source.parent / companion):
                shutil.copyfile(source.parent / companion, folder / companion)


def entry_of_file(path: Path) -> TokenizerEntry:
    """Return the manifest entry of the tokenizer in a file.

    Raises:
        UserError: the file is not a tokenizer file, or (SentencePiece) the library is not installed.
    """
    stats = path.stat()
    config = path.parent / _CONFIG
    return _entry(path.absolute(), stats.st_size, stats.st_mtime_ns,
                  config.stat().st_mtime_ns if config.is_file() else 0)


@functools.lru_cache(maxsize=16)
def _entry(path: Path, size: int, mtime_ns: int, config_mtime_ns: int) -> TokenizerEntry:
    kind = _kind(path)
    name = path.absolute().parent.name if path.name in _KNOWN else path.stem.removesuffix(".model")
    if kind == "tiktoken":
        digest = hashlib.sha256(read_bytes(path, _MAX_BYTES)).hexdigest()
        if digest != _LLAMA3_SHA256:
            raise UserError("this file has the tokens of tiktoken, but not the pattern that splits a text; the "
                            "pattern is known only for the file of Llama 3", where=str(path),
                            instead="pass the tokenizer.json of the same model")
        return TokenizerEntry(name, digest, kind=kind, vocab_size=_LLAMA3_TOKENS + _LLAMA3_SPECIAL_TOKENS,
                              end_of_text=_LLAMA3_END_OF_TEXT)
    if kind == "sentencepiece":
        content = read_bytes(path, _MAX_BYTES)
        model = _sentencepiece(path, content)
        end = model.eos_id()
        return TokenizerEntry(name, hashlib.sha256(content).hexdigest(), kind=kind,
                              vocab_size=model.vocab_size(), end_of_text=end if end >= 0 else None)
    table = _Table.read(path)
    return TokenizerEntry(name, table.fingerprint(), kind=kind, vocab_size=max(table.ids.values()) + 1,
                          end_of_text=table.end_of_text(path.parent / _CONFIG))


def _kind(path: Path) -> Literal["tokenizers", "sentencepiece", "tiktoken"]:
    if path.suffix == ".json":
        return "tokenizers"
    with reading(path), open_regular(path) as file:
        return "tiktoken" if _RANK.match(file.read(_RANK_BYTES)) else "sentencepiece"


@dataclass(frozen=True)
class _Table:
    """Content of a tokenizer.json, and the id of each of its tokens."""

    stored: dict[str, Any]
    ids: dict[str, int]

    @classmethod
    def read(cls, path: Path) -> _Table:
        """Read a tokenizer.json."""
        try:
            stored = read_json(path, _MAX_BYTES)
            if {"config", "vocab"} <= stored.keys() and "model" not in stored:
                raise UserError("it is a Tekken tokenizer of Mistral, which is not supported")
            vocabulary = stored["model"]["vocab"]
            # The vocabulary of a unigram model is a list of tokens and scores.
            ids = (dict(vocabulary) if isinstance(vocabulary, dict) else
                   {token: number for number, (token, _) in enumerate(vocabulary)})
            ids |= {token["content"]: token["id"] for token in stored.get("added_tokens") or ()}
            numbers = ids.values()
            if {*map(type, numbers)} != {int} or min(numbers) < 0 or max(numbers) >= MAX_IDS:
                raise ValueError(f"not all ids are from 0 to {MAX_IDS - 1:,}")
        except (UserError, LookupError, TypeError, ValueError, AttributeError) as error:
            reason = error.found if isinstance(error, UserError) else repr(error)
            raise UserError(f"this is not a tokenizer.json of Hugging Face tokenizers: {reason}", where=str(path),
                            instead="pass a tokenizer.json or a SentencePiece *.model, for example of the same "
                                    "model") from error
        return cls(stored, ids)

    def fingerprint(self) -> str:
        """Return a hash of everything that affects the ids, independent of how the file was saved."""
        content = {name: value for name, value in self.stored.items() if name not in _IGNORED_KEYS}
        model = dict(content["model"])
        if isinstance(model.get("merges"), list):  # newer versions write them as pairs
            model["merges"] = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        return hashlib.sha256(json.dumps(content | {"model": model}, sort_keys=True).encode()).hexdigest()

    def end_of_text(self, config: Path) -> int | None:
        """Return the id of the end-of-text token, from tokenizer_config.json or by its name."""
        token = _read_config(config).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        names = (token, *_END_OF_TEXT_NAMES) if isinstance(token, str) else _END_OF_TEXT_NAMES
        return next((self.ids[name] for name in names if name in self.ids), None)


def _read_config(path: Path) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json; empty if there is none."""
    stored = read_json(path, _MAX_BYTES) if path.is_file() else {}
    return stored if isinstance(stored, dict) else {}


def load(path: Path, entry: TokenizerEntry | None = None) -> FileTokenizer:
    """Load the tokenizer in a file.

    Args:
        entry: the expected entry, if known.

    Raises:
        UserError: the library is not installed, the file is damaged, or its fingerprint differs from the entry's.
    """
    actual = entry_of_file(path)
    if entry is not None and entry.fingerprint != actual.fingerprint:
        raise UserError(f"this tokenizer did not make the tokens: {entry.name} has the fingerprint "
                        f"{entry.fingerprint[:12]}, this file has {actual.fingerprint[:12]}", where=str(path),
                        instead=f"replace it with the {KINDS[entry.kind or '']} that made the tokens")
    return _load(path, entry or actual)


@functools.lru_cache(maxsize=4)
def _load(path: Path, entry: TokenizerEntry) -> FileTokenizer:
    # The entry is part of the cache key, because it differs if the file has changed.
    kinds = {"tokenizers": _JsonTokenizer, "sentencepiece": _ModelTokenizer, "tiktoken": _RanksTokenizer}
    return kinds[_kind(path)](path, entry)


class FileTokenizer:
    """Tokenizer of another library, loaded from `path`."""

    begin_of_text: tuple[int, ...] = ()
    special_tokens: Mapping[str, int] = {}
    encodes_special_tokens = False

    def __init__(self, path: Path, entry: TokenizerEntry) -> None:
        self.path = path
        self.entry, self.name, self.fingerprint = entry, entry.name, entry.fingerprint
        self.vocab_size, self.end_of_text = entry.vocab_size or 0, entry.end_of_text

    def encode(self, text: str) -> np.ndarray:
        """Return ids (1-d, uint32); lone surrogates become U+FFFD if the library rejects them."""
        try:
            return np.array(self._ids(text), np.uint32)
        except (UnicodeError, RuntimeError, TypeError):  # a lone surrogate; checking every text would be slow
            return np.array(self._ids(replace_surrogates(text)), np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text."""
        return [self.encode(text) for text in texts]

    def _ids(self, text: str) -> list[int] | np.ndarray:
        raise NotImplementedError

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Return the text of `ids`, decoded by the library."""
        raise NotImplementedError

    @functools.cached_property
    def _prepends_space(self) -> bool:
        """True if the library prepends a space to each text, even if the text starts with a space."""
        whole = self.encode("a a").tolist()
        return (whole != [*self.encode("a").tolist(), *self.encode(" a").tolist()]
                and whole == 2 * self.encode("a").tolist())

    def encode_rest(self, text: str) -> np.ndarray:
        """Return the ids of the text after a cut (see `cut`) within a document."""
        return self.encode(text[1:] if self._prepends_space and text.startswith(" ") else text)

    def cut(self, data: bytes) -> int:
        """Return a position where a document may be cut; 0 if there is none."""
        return find_checked_cut(data, self.encode, self.encode_rest)


class _JsonTokenizer(FileTokenizer):
    """Tokenizer from a tokenizer.json; special tokens within a text are encoded as ordinary text."""

    def __init__(self, path: Path, entry: TokenizerEntry) -> None:
        super().__init__(path, entry)
        tokenizers = import_package("tokenizers", f"the tokenizer in {path.name}", "tokenizers", str(path))
        try:
            self._inner = tokenizers.Tokenizer.from_str(read_bytes(path, _MAX_BYTES).decode())
        except BaseException as error:  # no more specific type; a panic of Rust is no Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise UserError(f"the library tokenizers cannot read this file: {error}", where=str(path),
                            instead="if a newer version wrote it: pip install -U tokenizers") from error
        self._inner.no_truncation()
        self._inner.no_padding()
        self.special_tokens = {token.content: number for number, token in
                               self._inner.get_added_tokens_decoder().items() if token.special}
        encoded = self._inner.encode("a")  # with the special tokens of its post-processor
        self.begin_of_text = tuple(encoded.ids[:[*encoded.special_tokens_mask, 0].index(0)])

    def _ids(self, text: str) -> list[int]:
        self._inner.encode_special_tokens = not self.encodes_special_tokens
        # encode_batch_fast omits offsets, which would double the time.
        return self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Return the text of `ids`, including special tokens."""
        return self._inner.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


class _ModelTokenizer(FileTokenizer):
    """Tokenizer from a SentencePiece *.model; control symbols within a text are encoded as ordinary text."""

    def __init__(self, path: Path, entry: TokenizerEntry) -> None:
        super().__init__(path, entry)
        self._inner = _sentencepiece(path, read_bytes(path, _MAX_BYTES))
        try:
            self._ids("")
        except TypeError as error:
            raise UserError("the installed sentencepiece is too old: it cannot return NumPy arrays",
                            where=str(path), instead="pip install 'sentencepiece>=0.2.3'") from error
        self.special_tokens = {self._inner.id_to_piece(number): number for number in
                               range(self._inner.vocab_size()) if self._inner.is_control(number)}
        begin = self._inner.bos_id()
        if begin >= 0 and _read_config(path.parent / _CONFIG).get("add_bos_token"):  # as transformers does
            self.begin_of_text = (begin,)

    def _ids(self, text: str) -> np.ndarray:
        return self._inner.encode(text, return_type="numpy")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, from one call: 10 % less time for texts of 5 kB, and 30 % for 300 bytes."""
        try:
            batch = self._inner.encode(list(texts), return_type="numpy", num_threads=1)
        except (UnicodeError, RuntimeError, TypeError):  # a lone surrogate in one of the texts
            return super().encode_batch(texts)
        return [ids.view(np.uint32) for ids in batch]

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Return the text of `ids`, without control symbols."""
        return self._inner.decode(np.asarray(ids).tolist())


class _RanksTokenizer(FileTokenizer):
    """Tokenizer from Llama 3's tokenizer.model; special tokens within a text are encoded as ordinary text."""

    begin_of_text = (_LLAMA3_BEGIN_OF_TEXT,)
    special_tokens: Mapping[str, int] = {  # those of all Llama 3 models; the file has none
        "<|begin_of_text|>": _LLAMA3_BEGIN_OF_TEXT, "<|end_of_text|>": _LLAMA3_END_OF_TEXT,
        "<|start_header_id|>": 128_006, "<|end_header_id|>": 128_007, "<|eot_id|>": 128_009}

    def __init__(self, path: Path, entry: TokenizerEntry) -> None:
        super().__init__(path, entry)
        lines = (line.split() for line in read_bytes(path, _MAX_BYTES).splitlines())
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        self._inner = tiktoken.Encoding(entry.name, pat_str=_LLAMA3_PIECES, mergeable_ranks=ranks,
                                        special_tokens={})

    def _ids(self, text: str) -> list[int]:
        return self._inner.encode_ordinary(text)  # encode_to_numpy takes 18 % longer

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Return the text of `ids`, without special tokens."""
        return self._inner.decode([token for token in np.asarray(ids).tolist() if token < _LLAMA3_TOKENS])


def _sentencepiece(path: Path, content: bytes) -> Any:
    library = import_package("sentencepiece", f"the tokenizer in {path.name}", "sentencepiece", str(path))
    try:
        model = library.SentencePieceProcessor()
        model.LoadFromSerializedProto(content)
    except (RuntimeError, ValueError, TypeError) as error:
        raise UserError(f"SentencePiece cannot read this file: {error}", where=str(path),
                        instead="pass a tokenizer.json or a SentencePiece *.model") from error
    return model
