"""Tokenizers: bytes and characters need no file, gpt2 needs one (`vocab.bpe`), kept in the cache.

Text that contains "<|endoftext|>" is ordinary text to each of them; the end-of-text token is only ever written
by `prepare`, before each document, as in GPT-2's own training data.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tiktoken

from ezpz_llm.base.outside import parse_json
from ezpz_llm.data.public import PublicFile
from ezpz_llm.errors import UserError, unknown

END_OF_TEXT = "<|endoftext|>"
TOKENIZERS = ("bytes", "char", "gpt2")

GPT2_VOCAB = PublicFile(
    what="the vocabulary of the gpt2 tokenizer", folder="tiktoken", name="vocab.bpe", size=456_318,
    address="https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe",
    sha256="1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    provide="python3 -m ezpz_llm.data tokenizer gpt2 --from-folder DIR (or --download)",
)
GPT2_NAMES = (GPT2_VOCAB.name, hashlib.sha1(GPT2_VOCAB.address.encode()).hexdigest())
"""What the file is called where it was published, and in a cache folder of tiktoken's."""

GPT2_FINGERPRINT = "247ecddaff45c30a3df42f9562b42c2fbc2a41cd6bad5d5bc5db912fb4deed3c"
"""Of the tokenizer that the published file makes; known here so that manifests can be checked without the file."""

# Any line is one piece: splitting by line only bounds how much is merged at once, and is 4 times as fast as
# splitting by character.
_LINES = r"[^\n]*\n|[^\n]+"
# The pieces of GPT-2 (encoder.py of its release) in the equivalent, faster form that tiktoken gives them.
_GPT2_PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


class Tokenizer(Protocol):
    """Text to ids in [0, vocab_size) and back; `fingerprint` (sha256) tells two different ones apart."""

    name: str
    vocab_size: int
    end_of_text: int | None
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """Ids, 1-d, of an unsigned integer type. No end-of-text is added or recognised."""

    def decode(self, ids: np.ndarray) -> str:
        """The text; bytes that are not UTF-8 come out as U+FFFD."""


class EncodingTokenizer:
    """A tiktoken `Encoding` whose one special token is end-of-text, the last id."""

    def __init__(self, name: str, pieces: str, ranks: dict[bytes, int]) -> None:
        self.name = name
        self.end_of_text: int | None = len(ranks)
        self.vocab_size = len(ranks) + 1
        self.encoding = tiktoken.Encoding(name, pat_str=pieces, mergeable_ranks=ranks,
                                          special_tokens={END_OF_TEXT: self.end_of_text})
        self.fingerprint = _fingerprint(name, pieces, ranks)

    def encode(self, text: str) -> np.ndarray:
        return self.encoding.encode_to_numpy(whole_characters(text), disallowed_special=())

    def decode(self, ids: np.ndarray) -> str:
        return self.encoding.decode(np.asarray(ids).tolist())


def _fingerprint(name: str, pieces: str, ranks: Mapping[bytes, int]) -> str:
    # Each entry ends in a newline in hex, so no two tables give the same bytes.
    table = "".join(f"{token.hex()}\n" for token in sorted(ranks, key=ranks.__getitem__))
    return hashlib.sha256(f"{name}\n{pieces}\n{table}".encode()).hexdigest()


def gpt2_fingerprint(ranks: Mapping[bytes, int]) -> str:
    """The fingerprint of the gpt2 tokenizer, if these were its ranks."""
    return _fingerprint("gpt2", _GPT2_PIECES, ranks)


class CharTokenizer:
    """One id per distinct character, in code point order; there is no end-of-text.

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
        """Ids of `text`.

        Raises:
            UserError: a character that is not in the table.
        """
        points = _code_points(text)
        ids = np.searchsorted(self._points, points)
        known = self._points[np.minimum(ids, self.vocab_size - 1)] == points
        if not known.all():
            bad = text[int(np.argmin(known))]
            raise UserError(
                f"unknown character {bad!r} (U+{ord(bad):04X}), not one of the tokenizer's {self.vocab_size}",
                instead="leave it out, or use the tokenizer bytes, which knows every text",
            )
        return ids.astype(np.uint32)

    def decode(self, ids: np.ndarray) -> str:
        return "".join(self.characters[i] for i in np.asarray(ids).tolist())


def get_tokenizer(name: str, characters: str = "") -> Tokenizer:
    """The tokenizer `name`; "char" needs the sorted distinct characters of its corpus.

    Raises:
        UserError: unknown name, or gpt2's file is not on this machine.
    """
    if name == "bytes":
        return _checked(EncodingTokenizer("bytes", _LINES, {bytes([value]): value for value in range(256)}))
    if name == "char":
        return CharTokenizer(characters)
    if name == "gpt2":
        return _checked(EncodingTokenizer("gpt2", _GPT2_PIECES, read_merges(GPT2_VOCAB.find().read_text("utf-8"))))
    raise unknown("tokenizer", name, TOKENIZERS)


def _checked(tokenizer: EncodingTokenizer) -> EncodingTokenizer:
    # Before 0.11 tiktoken's numpy call took no notice of which special tokens a text may have; the call without
    # numpy, right in every version, takes 1.4 times (gpt2) to 2.5 times (bytes) as long.
    if tokenizer.end_of_text in tokenizer.encode(END_OF_TEXT):
        raise UserError(f"tiktoken {version('tiktoken')} takes {END_OF_TEXT} in a text for the end of a document",
                        instead="pip install 'tiktoken>=0.11'")
    return tokenizer


def read_merges(text: str) -> dict[bytes, int]:
    """Ranks from a `vocab.bpe`: the 256 bytes in GPT-2's order, then one per merge line."""
    alphabet = byte_alphabet()
    byte_of = {character: value for value, character in alphabet.items()}
    ranks = {bytes([value]): rank for rank, value in enumerate(alphabet)}
    for line in text.split("\n")[1:]:
        if line:
            ranks[bytes(byte_of[character] for character in line.replace(" ", ""))] = len(ranks)
    return ranks


def byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in GPT-2's files, in its order of bytes.

    The printable ones of Latin-1 stand for themselves, the others are mapped to U+0100 onwards (GPT-2's
    encoder.py).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(printable)]
    return {value: chr(value) for value in printable} | {value: chr(0x100 + at) for at, value in enumerate(others)}


def provide_gpt2(folder: Path) -> Path:
    """Copy gpt2's file from `folder`, where it has its own name or the one of tiktoken's cache.

    Raises:
        UserError: it is not there, or is another file.
    """
    for name in GPT2_NAMES:
        if (folder / name).is_file():
            return GPT2_VOCAB.copy_from(folder / name)
    raise UserError(f"neither {' nor '.join(GPT2_NAMES)} is in this folder", where=str(folder.absolute()),
                    instead=f"name the folder that has vocab.bpe, published at {GPT2_VOCAB.address}")


def to_entry(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a manifest keeps of a tokenizer, enough to make it again."""
    entry = {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint}
    return entry | {"table": tokenizer.characters} if isinstance(tokenizer, CharTokenizer) else entry


def check_entry(entry: Mapping[str, Any], where: str | None = None) -> None:
    """That the ids of a manifest's tokens mean what they would mean here; needs no file.

    Raises:
        UserError: the tokenizer of that name here is not the one that made the tokens.
    """
    if entry["name"] != "gpt2":
        from_entry(entry, where)
    elif entry["fingerprint"] != GPT2_FINGERPRINT:
        raise _another(entry, GPT2_FINGERPRINT, where)


def from_entry(entry: Mapping[str, Any], where: str | None = None) -> Tokenizer:
    """The tokenizer that wrote a manifest's tokens.

    Raises:
        UserError: the one of that name here is not the same, so the ids would mean other text.
    """
    return _from_json(json.dumps(entry), where)


@functools.lru_cache(maxsize=4)
def _from_json(entry_json: str, where: str | None) -> Tokenizer:
    entry = parse_json(entry_json, where or "a tokenizer")
    tokenizer = get_tokenizer(entry["name"], entry.get("table", ""))
    if tokenizer.fingerprint != entry["fingerprint"]:
        raise _another(entry, tokenizer.fingerprint, where)
    return tokenizer


def _another(entry: Mapping[str, Any], here: str, where: str | None) -> UserError:
    return UserError(
        f"these tokens were made by another {entry['name']} tokenizer: fingerprint {entry['fingerprint']}, "
        f"here {here}", where=where, instead="prepare the corpus again",
    )


def whole_characters(text: str) -> str:
    """`text` with lone surrogates, which no UTF-8 can hold, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
