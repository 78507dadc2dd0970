"""Built-in tokenizers (bytes, char, gpt2), and the choice of a tokenizer by name, file or folder.

bytes and char need no file; gpt2 needs `vocab.bpe`, which is kept in the cache. `tokenizer_files.py` has the
tokenizers of other libraries.

"<|endoftext|>" within a text is ordinary text to all tokenizers. Only `prepare` writes the end-of-text token,
before each document, as in GPT-2's training data.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tiktoken

from ezpz_llm.core.base import UserError, read_json, require_package, unknown_name_error, user_path
from ezpz_llm.core.base.records import as_record
from ezpz_llm.training.data.downloads import PublicFile
from ezpz_llm.training.data.manifest import MANIFEST, TokenizerEntry
from ezpz_llm.training.data.text import find_cut, replace_surrogates
from ezpz_llm.training.data.tokenizer_files import (
    FileTokenizer,
    entry_of_file,
    find_copy,
    find_file,
    load,
)

END_OF_TEXT = "<|endoftext|>"
TOKENIZERS = ("bytes", "char", "gpt2")

GPT2_VOCAB = PublicFile(
    what="the vocabulary of the gpt2 tokenizer", folder="tiktoken", name="vocab.bpe", size=456_318,
    address="https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe",
    sha256="1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    provide="python3 -m ezpz_llm.data tokenizer gpt2 --from-folder DIR (or --download)",
)
GPT2_NAMES = (GPT2_VOCAB.name, hashlib.sha1(GPT2_VOCAB.address.encode()).hexdigest())
"""Published name of vocab.bpe, and its name in tiktoken's cache folder."""

GPT2_FINGERPRINT = "247ecddaff45c30a3df42f9562b42c2fbc2a41cd6bad5d5bc5db912fb4deed3c"
"""Fingerprint of the published tokenizer, so that manifests can be checked without the file."""

# Splitting bytes by line only bounds the size of a piece, and is 4 times as fast as splitting by character.
_LINES = r"[^\n]*\n|[^\n]+"
# The pieces of GPT-2 (encoder.py of its release), in tiktoken's equivalent, faster form.
_GPT2_PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


class Tokenizer(Protocol):
    """Converter between text and ids in [0, vocab_size); `fingerprint` is a sha256 of its table.

    `begin_of_text` are the ids that its own library puts before a prompt, as for Llama; empty for most.
    `special_tokens` has their ids by name; their names in a text are encoded as tokens if `encodes_special_tokens`.
    """

    name: str
    vocab_size: int
    end_of_text: int | None
    fingerprint: str
    begin_of_text: tuple[int, ...]
    special_tokens: Mapping[str, int]
    encodes_special_tokens: bool

    def encode(self, text: str) -> np.ndarray:
        """Return ids, 1-d, of an unsigned type, without adding or interpreting end-of-text."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text."""

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Return the text; bytes that are not UTF-8 become U+FFFD."""

    def cut(self, data: bytes) -> int:
        """Return a position where a cut does not change a document's ids; 0 if there is none."""

    def encode_rest(self, text: str) -> np.ndarray:
        """Return the ids of the text after a cut."""


class _CutBetweenWords:
    """Mixin for tokenizers that encode the text after a cut like any other text, and start a text with no token."""

    begin_of_text: tuple[int, ...] = ()
    special_tokens: Mapping[str, int] = {}
    encodes_special_tokens = False

    def cut(self, data: bytes) -> int:
        return find_cut(data)

    def encode_rest(self, text: str) -> np.ndarray:
        return self.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def encode(self, text: str) -> np.ndarray:
        raise NotImplementedError


class EncodingTokenizer(_CutBetweenWords):
    """Tokenizer based on a tiktoken `Encoding`; its only special token is end-of-text, the last id."""

    def __init__(self, name: str, pieces: str, ranks: dict[bytes, int]) -> None:
        self.name = name
        self.end_of_text: int | None = (end := len(ranks))
        self.vocab_size = len(ranks) + 1
        self.special_tokens = {END_OF_TEXT: end}
        self.encoding = tiktoken.Encoding(name, pat_str=pieces, mergeable_ranks=ranks,
                                          special_tokens={END_OF_TEXT: self.end_of_text})
        self.fingerprint = _fingerprint(name, pieces, ranks)

    def encode(self, text: str) -> np.ndarray:
        """Return ids (1-d, uint32); `<|endoftext|>` within a text is ordinary text by default."""
        if self.encodes_special_tokens:
            return self.encoding.encode_to_numpy(replace_surrogates(text), allowed_special="all")
        return self.encoding.encode_to_numpy(replace_surrogates(text), disallowed_special=())

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.encoding.decode(np.asarray(ids).tolist())


def _fingerprint(name: str, pieces: str, ranks: Mapping[bytes, int]) -> str:
    # Tokens are in hex and end with a newline, so that different tables give different bytes.
    table = "".join(f"{token.hex()}\n" for token in sorted(ranks, key=ranks.__getitem__))
    return hashlib.sha256(f"{name}\n{pieces}\n{table}".encode()).hexdigest()


class CharTokenizer(_CutBetweenWords):
    """Tokenizer with one id per distinct character, in code point order, and no end-of-text.

    Args:
        characters: the distinct characters, in order.
    """

    name = "char"
    end_of_text: int | None = None

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.vocab_size = len(characters)
        self.fingerprint = hashlib.sha256(f"char\n{characters}".encode("utf-8", "surrogatepass")).hexdigest()
        self._points = _code_points(characters)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`.

        Raises:
            UserError: a character is not in the table.
        """
        points = _code_points(text)
        ids = np.searchsorted(self._points, points)
        is_known = self._points[np.minimum(ids, self.vocab_size - 1)] == points
        if not is_known.all():
            bad = text[int(np.argmin(is_known))]
            raise UserError(
                f"unknown character {bad!r} (U+{ord(bad):04X}): not among the {self.vocab_size} characters of the "
                "tokenizer", instead="remove it from the text, or use --tokenizer bytes, which can encode any text",
            )
        return ids.astype(np.uint32)

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Return the text of `ids`, one character per id."""
        return "".join(self.characters[i] for i in np.asarray(ids).tolist())


@functools.lru_cache(maxsize=4)
def get_tokenizer(name: str, characters: str = "") -> Tokenizer:
    """Return the tokenizer `name`; "char" requires the sorted distinct characters of its corpus.

    Raises:
        UserError: unknown name, or gpt2's file is not on this machine.
    """
    if name == "bytes":
        return _checked(EncodingTokenizer("bytes", _LINES, {bytes([value]): value for value in range(256)}))
    if name == "char":
        return CharTokenizer(characters)
    if name == "gpt2":
        return _checked(EncodingTokenizer("gpt2", _GPT2_PIECES, read_merges(GPT2_VOCAB.find().read_text("utf-8"))))
    raise unknown_name_error("tokenizer", name, TOKENIZERS)


def _checked(tokenizer: EncodingTokenizer) -> EncodingTokenizer:
    # Before tiktoken 0.11, encode_to_numpy ignored disallowed_special. The call without NumPy, which is correct in
    # every version, takes 1.4 times (gpt2) to 2.5 times (bytes) as long.
    if tokenizer.end_of_text in tokenizer.encode(END_OF_TEXT):
        raise UserError(f"tiktoken {version('tiktoken')} encodes {END_OF_TEXT} within a text as the end of a "
                        "document", instead="pip install 'tiktoken>=0.11'")
    return tokenizer


def read_merges(text: str) -> dict[bytes, int]:
    """Parse the ranks in a `vocab.bpe`: the 256 bytes in GPT-2's order, then one per merge line."""
    alphabet = byte_alphabet()
    byte_of = {character: value for value, character in alphabet.items()}
    ranks = {bytes([value]): rank for rank, value in enumerate(alphabet)}
    for line in text.split("\n")[1:]:
        if line:
            ranks[bytes(byte_of[character] for character in line.replace(" ", ""))] = len(ranks)
    return ranks


def byte_alphabet() -> dict[int, str]:
    """Return the printable character for each byte in GPT-2's files, in GPT-2's order of bytes.

    Printable Latin-1 bytes map to themselves, the others to U+0100 onwards (GPT-2's encoder.py).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in set(printable)]
    return {value: chr(value) for value in printable} | {value: chr(0x100 + at) for at, value in enumerate(hidden)}


def install_gpt2(folder: Path) -> Path:
    """Copy gpt2's file from `folder`, under its published name or its name in tiktoken's cache.

    Raises:
        UserError: the file is missing, or has other content.
    """
    for name in GPT2_NAMES:
        if (folder / name).is_file():
            return GPT2_VOCAB.copy_from(folder / name)
    raise UserError(f"neither {' nor '.join(GPT2_NAMES)} is in this folder", where=str(folder.absolute()),
                    instead=f"pass the folder that contains vocab.bpe, published at {GPT2_VOCAB.address}")


def to_entry(tokenizer: Tokenizer) -> TokenizerEntry:
    """Return a tokenizer's manifest entry, from which (with its file, if any) `from_entry` can load it."""
    if isinstance(tokenizer, FileTokenizer):
        return tokenizer.entry
    table = tokenizer.characters if isinstance(tokenizer, CharTokenizer) else None
    return TokenizerEntry(tokenizer.name, tokenizer.fingerprint, table)


def gpt2_entry() -> TokenizerEntry:
    """Return the manifest entry of gpt2; does not need its file."""
    return TokenizerEntry("gpt2", GPT2_FINGERPRINT)


def check_entry(entry: TokenizerEntry, where: str | None = None) -> None:
    """Check that a built-in tokenizer in a manifest is the same as this version's; needs no file.

    Raises:
        UserError: a different version of that tokenizer made the tokens.
    """
    if entry.kind is not None:
        return  # `load` compares the fingerprint of its file
    if entry.name != "gpt2":
        from_entry(entry, where)
    elif entry.fingerprint != GPT2_FINGERPRINT:
        raise _other_tokenizer_error(entry, GPT2_FINGERPRINT, where)


def check_files(entry: TokenizerEntry, folder: Path) -> None:
    """Check that a manifest's tokenizer can be loaded, without loading it.

    Args:
        folder: may contain a copy of its file.

    Raises:
        UserError: its file or its library is not on this machine.
    """
    if entry.kind is not None:
        require_package(entry.kind, f"the tokenizer {entry.name}", entry.kind, str(folder))
        find_copy(folder, entry)
    elif entry.name == "gpt2":
        GPT2_VOCAB.find()


def from_entry(entry: TokenizerEntry, where: str | None = None, folder: Path | None = None) -> Tokenizer:
    """Load the tokenizer that made a manifest's tokens.

    Args:
        folder: may contain a copy of its file; see `find_copy`.

    Raises:
        UserError: the tokenizer's file is missing, or its fingerprint differs from the entry's.
    """
    if entry.kind is not None:
        return load(find_copy(folder or Path(), entry), entry)
    tokenizer = get_tokenizer(entry.name, entry.table or "")
    if tokenizer.fingerprint != entry.fingerprint:
        raise _other_tokenizer_error(entry, tokenizer.fingerprint, where)
    return tokenizer


def _other_tokenizer_error(entry: TokenizerEntry, fingerprint: str, where: str | None) -> UserError:
    return UserError(
        f"another {entry.name} tokenizer made these tokens: its fingerprint is {entry.fingerprint}, "
        f"here it is {fingerprint}", where=where, instead="prepare the corpus again",
    )


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


_STATE = "state.json"
_OTHER_FILES = {"vocab.txt": "WordPiece (vocab.txt)",
                "merges.txt": "BPE (vocab.json and merges.txt, without a tokenizer.json)",
                "tekken.json": "Tekken (tekken.json)", "qwen.tiktoken": "tiktoken (qwen.tiktoken)"}
_MAX_BYTES = 256 << 20
"""Size limit of a manifest."""
_ACCEPTED = ("a tokenizer.json, a SentencePiece *.model, Llama 3's tokenizer.model, or a folder with one of them, "
             "token shards or a checkpoint")


@dataclass(frozen=True)
class Choice:
    """Requested tokenizer.

    Attributes:
        name: "bytes", "char", "gpt2", or the name of another library's tokenizer.
        words: its name as a command-line argument: the name, or an absolute path.
        entry: its manifest entry; None if only a name is given, which matches any table of that tokenizer.
        file: file of another library's tokenizer.
    """

    name: str
    words: str
    entry: TokenizerEntry | None = None
    file: Path | None = None

    @property
    def table(self) -> str | None:
        """Further part of its identity: the characters of "char", or hash and end-of-text of another library's."""
        if self.entry is None:
            return None
        return f"{self.entry.fingerprint} {self.entry.end_of_text}" if self.entry.kind else self.entry.table

    @property
    def has_end_of_text(self) -> bool:
        """True if the tokenizer has an end-of-text token."""
        if self.entry is not None and self.entry.kind is not None:
            return self.entry.end_of_text is not None
        return self.name != CharTokenizer.name

    def fits(self, entry: TokenizerEntry) -> bool:
        """Return True if the tokenizer with the manifest entry `entry` satisfies this request."""
        if self.entry is None:
            return self.name == entry.name and entry.kind is None
        return self.entry.has_same_ids(entry)

    def describe(self) -> str:
        """Return its name for messages, with the fingerprint if the name alone is ambiguous."""
        return describe(self.entry) if self.entry is not None else self.name

    def load(self) -> Tokenizer:
        """Load the tokenizer; "char" without a table has no characters."""
        if self.file is not None:
            return load(self.file, self.entry)
        return get_tokenizer(self.name) if self.entry is None else from_entry(self.entry, self.words)


def describe(entry: TokenizerEntry) -> str:
    """Return a tokenizer's name, size and end-of-text, as far as the entry has them, and fingerprint, shortened."""
    size = f"{len(entry.table)} characters, " if entry.table is not None else ""
    if entry.kind is not None:
        size = f"{entry.kind}, {entry.vocab_size:,} tokens, "
    if entry.end_of_text is not None:
        size += f"end-of-text {entry.end_of_text}, "
    return f"{entry.name} ({size}fingerprint {entry.fingerprint[:12]})"


def tokenizer_argument(entry: TokenizerEntry, folder: Path) -> str:
    """Return the value of --tokenizer for the tokenizer of `folder`."""
    return str(folder.absolute()) if entry.table is not None or entry.kind is not None else entry.name


def choose_tokenizer(words: str) -> Choice:
    """Return the tokenizer that `words` names.

    Raises:
        UserError: neither a name nor a path, no supported tokenizer at that path, or its library is not installed.
    """
    if words in TOKENIZERS:
        return Choice(words, words)
    path = user_path(words).absolute()
    if not os.path.exists(path):  # also False if the name is too long for a path
        raise unknown_name_error("tokenizer", words, TOKENIZERS, or_path=True,
                                 where=f"--tokenizer, which also accepts {_ACCEPTED}")
    entry = find_entry(path)
    if entry is None:
        unsupported = find_unsupported_tokenizer(path)
        raise UserError(f"this folder's tokenizer is {unsupported}, which is not supported" if unsupported else
                        "this folder contains no tokenizer" if path.is_dir() else
                        "this file is not a tokenizer: its name ends in neither .json nor .model",
                        where=f"--tokenizer {path}", instead=f"pass {_ACCEPTED}")
    if entry.kind is None:
        return Choice(entry.name, tokenizer_argument(entry, path), entry)
    require_package(entry.kind, f"the tokenizer {entry.name}", entry.kind, f"--tokenizer {path}")
    return Choice(entry.name, str(path), entry, find_file(path) or find_copy(path, entry))


def find_entry(path: Path) -> TokenizerEntry | None:
    """Return the manifest entry of the tokenizer in a file or folder; None if there is none."""
    for name in (_STATE, MANIFEST):
        stored = _read_json_object(path / name).get("tokenizer")
        if isinstance(stored, dict) and {"name", "fingerprint"} <= stored.keys():
            return as_record(TokenizerEntry, stored, str(path / name), "tokenizer")
    file = find_file(path)
    if file is None:
        return None
    stats = file.stat()
    built_in = _built_in_in(file, stats.st_size, stats.st_mtime_ns) if file.suffix == ".json" else None
    return entry_of_file(file) if built_in is None else built_in


@functools.lru_cache(maxsize=16)
def _built_in_in(file: Path, size: int, mtime_ns: int) -> TokenizerEntry | None:
    """Match a tokenizer.json with the built-in tokenizers; size and time identify its content."""
    return match_built_in(_read_json_object(file))


def find_unsupported_tokenizer(folder: Path) -> str | None:
    """Return the name of an unsupported tokenizer in a model's folder, or None."""
    return next((name for file, name in _OTHER_FILES.items() if (folder / file).is_file()), None)


def match_built_in(stored: Mapping[str, Any]) -> TokenizerEntry | None:
    """Return the manifest entry of the built-in tokenizer that is equivalent to a tokenizer.json, or None.

    Compares fingerprints of the table in `stored`, so gpt2's file is not needed.
    """
    try:
        return _match_built_in(stored)
    except (KeyError, TypeError, AttributeError, ValueError):
        return None


def _match_built_in(stored: Mapping[str, Any]) -> TokenizerEntry | None:
    model, added = stored["model"], stored.get("added_tokens") or []
    changes = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback",
               "ignore_merges")
    # Special tokens do not occur in an encoded text, but other added tokens would.
    if (model.get("type", "BPE") != "BPE" or stored.get("normalizer") is not None
            or any(model.get(name) for name in changes) or not all(token["special"] for token in added)):
        return None
    vocabulary = dict(model["vocab"])
    end = vocabulary.pop(END_OF_TEXT, None)
    end = next((token["id"] for token in added if token["content"] == END_OF_TEXT), end)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    pieces = stored.get("pre_tokenizer")
    if pieces is None:
        characters = sorted(vocabulary)
        ids = [vocabulary[character] for character in characters]
        if merges or end is not None or ids != list(range(len(characters))):
            return None
        return to_entry(CharTokenizer("".join(characters))) if {*map(len, characters)} == {1} else None
    if pieces["type"] != "ByteLevel" or pieces.get("add_prefix_space", True) or end != len(vocabulary):
        return None
    byte_of = {character: value for value, character in byte_alphabet().items()}
    ranks = {bytes(byte_of[character] for character in token): rank for token, rank in vocabulary.items()}
    if not pieces.get("use_regex", True):
        return to_entry(get_tokenizer("bytes")) if ranks == {bytes([n]): n for n in range(256)} else None
    is_gpt2 = _fingerprint("gpt2", _GPT2_PIECES, ranks) == GPT2_FINGERPRINT
    return gpt2_entry() if is_gpt2 and ranks == read_merges("\n".join(["", *merges])) else None


def _read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing or contains no JSON object."""
    try:
        stored = read_json(path, _MAX_BYTES)
    except UserError:
        return {}
    return stored if isinstance(stored, dict) else {}
