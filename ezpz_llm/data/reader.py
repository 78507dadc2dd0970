"""Reading a corpus in pieces of bounded size that tokenise to the same ids as the whole would.

A task says where the next one begins (`after`), so that reading can be taken up there by another process: for files
the file's number, the offset in it (bytes, or rows of parquet) and the line; for a data set its own state.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ezpz_llm.data.corpora import Corpus, SourceFile
from ezpz_llm.data.hub import read_dataset
from ezpz_llm.data.parquet import Documents, read_rows
from ezpz_llm.data.public import reading
from ezpz_llm.data.tokenizers import whole_characters
from ezpz_llm.errors import UserError

PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Piece:
    """A part of one file.

    Attributes:
        offset: of its first byte in the file.
        line: number of its first line (jsonl only; 1 otherwise).
    """

    path: Path
    is_jsonl: bool
    data: bytes
    offset: int
    line: int

    @property
    def source_bytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True)
class Task:
    """What one process encodes at once, and where the corpus goes on after it."""

    pieces: list[Piece | Documents]
    after: dict[str, Any] = field(default_factory=dict)

    @property
    def source_bytes(self) -> int:
        return sum(piece.source_bytes for piece in self.pieces)


def tasks(corpus: Corpus, after: Mapping[str, Any] | None = None, size: int = PIECE_BYTES,
          revision: str | None = None) -> Iterator[Task]:
    """The corpus in order from the place `after`, in tasks of about `size` bytes: small files are taken together.

    Args:
        revision: of a data set; see `ezpz_llm.data.hub`.

    Raises:
        UserError: a file or data set cannot be read.
    """
    if corpus.dataset is not None:
        for documents, state in read_dataset(corpus.dataset, revision, size, (after or {}).get("dataset")):
            yield Task([documents], {"dataset": state})
        return
    pieces: list[Piece | Documents] = []
    held, place = 0, {}
    for piece, place in _located(corpus.files, after or {}, size):
        pieces.append(piece)
        held += piece.source_bytes
        if held >= size:
            yield Task(pieces, place)
            pieces, held = [], 0
    if pieces:
        yield Task(pieces, place)


def texts(piece: Piece | Documents) -> Iterator[tuple[bool, str]]:
    """The texts of a piece, each with whether a document begins with it; empty ones are left out.

    Raises:
        UserError: not UTF-8, or a jsonl line or a row without text; with file and byte, line or row number.
    """
    if isinstance(piece, Documents):
        for number, document in enumerate(piece.texts, start=piece.first):
            if document is None:
                raise UserError(f'row {number} has no "text"', where=piece.where, instead="leave such rows out")
            if document:
                yield True, whole_characters(document)
        return
    try:
        text = piece.data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"not UTF-8 text: byte 0x{piece.data[error.start]:02x} at offset {piece.offset + error.start:,}",
            where=str(piece.path), instead="leave the file out, or convert it: iconv -f LATIN1 -t UTF-8 FILE",
        ) from error
    if not piece.is_jsonl:
        yield piece.offset == 0, text
        return
    for number, line in enumerate(text.split("\n"), start=piece.line):
        if line.strip() and (document := _document(line, piece.path, number)):
            yield True, document


def _document(line: str, path: Path, number: int) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        found = f"line {number} is not JSON: {error}"
    else:
        if isinstance(value, dict) and isinstance(value.get("text"), str):
            return whole_characters(value["text"])
        found = f'line {number} has no "text"'
    raise UserError(found, where=f"{path}:{number}", instead='each line is an object like {"text": "…"}')


def _located(files: Iterable[SourceFile], after: Mapping[str, Any],
             size: int) -> Iterator[tuple[Piece | Documents, dict[str, Any]]]:
    """Each piece, and the place after it."""
    first, offset, line = after.get("file", 0), after.get("offset", 0), after.get("line", 1)
    for number, file in enumerate(files):
        if number < first:
            continue
        if file.is_parquet:
            for rows in read_rows(file.path, offset, size):
                yield rows, {"file": number, "offset": rows.first + len(rows.texts)}
        else:
            for piece in _pieces(file, size, offset, line):
                lines = piece.data.count(b"\n") if file.is_jsonl else 0
                yield piece, {"file": number, "offset": piece.offset + len(piece.data), "line": piece.line + lines}
        offset, line = 0, 1


def _pieces(file: SourceFile, size: int, offset: int, line: int) -> Iterator[Piece]:
    cut = _after_last_line if file.is_jsonl else cut_text
    carry = b""
    with reading(file.path), file.path.open("rb") as stream:
        stream.seek(offset)
        while True:
            # Reading as much again as was carried over keeps the work linear where no place to cut is found.
            wanted = max(size, len(carry))
            block = stream.read(wanted)
            data = carry + block
            end = cut(data) if len(block) == wanted else len(data)
            if end:
                yield Piece(file.path, file.is_jsonl, data[:end], offset, line)
            if len(block) < wanted:
                return
            line += data.count(b"\n", 0, end) if file.is_jsonl else 0
            offset += end
            carry = data[end:]


def _after_last_line(data: bytes) -> int:
    return data.rfind(b"\n") + 1


def cut_text(data: bytes) -> int:
    """The last place where cutting changes no token; 0 where there is none.

    GPT-2's pieces never reach over a single space or newline between two characters that are not white space: a
    space belongs to the word after it, a newline stands alone. So the cut is before such a space, or after such
    a newline. The other tokenizers can be cut anywhere.
    """
    return _last_between_words(data, b" ", 0) or _last_between_words(data, b"\n", 1)


def _last_between_words(data: bytes, separator: bytes, shift: int) -> int:
    place = len(data)
    while (place := data.rfind(separator, 0, place)) > 0:
        # At most four bytes make a character; what is cut off at either end is ignored, not its neighbour.
        before = data[max(0, place - 4):place].decode("utf-8", "ignore")
        after = data[place + 1:place + 5].decode("utf-8", "ignore")
        if before and after and not before[-1].isspace() and not after[0].isspace():
            return place + shift
    return 0
