"""Read a corpus in pieces of bounded size that tokenize to the same ids as the whole corpus.

Each task records the start of the next one (`after`), so that another process can resume there. For files, this is
the file's index, the offset in its content (bytes, parquet rows or array items) and the line; for a data set, its
state. A compressed file is decompressed again up to that offset.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import UserError, parse_json, parse_plain_json
from ezpz_llm.training.data.corpora import Corpus, SourceFile
from ezpz_llm.training.data.formats import (
    BOM,
    LONGEST_LINE,
    TEXT,
    Documents,
    Format,
    NoText,
    find_format,
    looks_like_text,
    open_unpacked,
    read_array,
    read_rows,
    text_of,
)
from ezpz_llm.training.data.hub import read_dataset
from ezpz_llm.training.data.text import find_cut, replace_surrogates

_PIECE_BYTES = 4 << 20
_CHECKED_BYTES = 64 << 10
"""Bytes of a file that are checked before a run starts."""


@dataclass(frozen=True)
class Piece:
    """Part of one file.

    Attributes:
        is_jsonl: True for JSON lines, one document per line.
        offset: offset of its first byte in the decompressed content.
        line: number of its first line (jsonl only; 1 otherwise).
        source_bytes: bytes of the file that were read for this part.
    """

    path: Path
    is_jsonl: bool
    data: bytes
    offset: int
    line: int
    source_bytes: int

    @property
    def has_mark(self) -> bool:
        """True if the piece starts with a byte-order mark, which is not part of the text."""
        return self.offset == 0 and self.data.startswith(BOM)


@dataclass(frozen=True)
class Reading:
    """Options for reading documents.

    Attributes:
        key: key of the text in a JSON object, or name of the text column.
        skip_broken: skip and count broken documents instead of raising an error.
    """

    key: str = TEXT
    skip_broken: bool = False


_STRICT = Reading()


@dataclass(frozen=True)
class Task:
    """Part of the corpus that one process encodes in one call, and the position after that part.

    All of it is of the validation split if `is_validation`.
    """

    pieces: list[Piece | Documents]
    after: dict[str, Any] = field(default_factory=dict)
    reading: Reading = _STRICT
    is_validation: bool = False

    @property
    def source_bytes(self) -> int:
        """Bytes read for its pieces, for progress."""
        return sum(piece.source_bytes for piece in self.pieces)


def tasks(corpus: Corpus, after: Mapping[str, Any] | None = None, size: int = _PIECE_BYTES,
          revision: str | None = None, reading: Reading = _STRICT,
          cut: Callable[[bytes], int] = find_cut) -> Iterator[Task]:
    """Yield the corpus in order from the position `after`, in tasks of about `size` bytes; small files are merged.

    Args:
        revision: revision of a data set; see `ezpz_llm.training.data.hub`.
        cut: the tokenizer's `cut`, which returns where a long text may be cut.

    Raises:
        UserError: a file or data set cannot be read.
    """
    if corpus.dataset is not None:
        for documents, state in read_dataset(corpus.dataset, revision, size, (after or {}).get("dataset"),
                                             reading.key):
            yield Task([documents], {"dataset": state}, reading)
        return
    pieces: list[Piece | Documents] = []
    buffered = 0
    position: dict[str, Any] = {}
    is_validation = False
    for piece, piece_end in _located_pieces(corpus, after or {}, size, reading, cut):
        if pieces and _is_validation(corpus, piece_end) != is_validation:
            yield Task(pieces, position, reading, is_validation)
            pieces, buffered = [], 0
        is_validation, position = _is_validation(corpus, piece_end), piece_end
        pieces.append(piece)
        buffered += _content_bytes(piece)
        if buffered >= size:
            yield Task(pieces, position, reading, is_validation)
            pieces, buffered = [], 0
    if pieces:
        yield Task(pieces, position, reading, is_validation)


def _is_validation(corpus: Corpus, position: Mapping[str, Any]) -> bool:
    # The position after a skipped file is in the next one, which may not exist.
    return corpus.files[min(position["file"], len(corpus.files) - 1)].is_validation


def _content_bytes(piece: Piece | Documents) -> int:
    """Estimate the CPU memory of a piece; for compressed files and parquet, this exceeds the bytes read."""
    if isinstance(piece, Piece):
        return len(piece.data)
    return sum(len(text) if isinstance(text, str) else 0 for text in piece.texts)


def texts(piece: Piece | Documents, reading: Reading = _STRICT,
          broken: list[UserError] | None = None) -> Iterator[tuple[bool, str]]:
    """Yield the non-empty texts of a piece, each with a flag that is True if a document starts with it.

    Args:
        broken: receives the error of each skipped document.

    Raises:
        UserError: a document is broken (not UTF-8, not JSON, no text) and `reading.skip_broken` is False. The
            message has the file and the byte, line or row number.
    """
    for begins, text in _texts_or_errors(piece, reading):
        if not isinstance(text, UserError):
            yield begins, text
        elif not reading.skip_broken:
            raise text
        elif broken is not None:
            broken.append(text)


def check_documents(corpus: Corpus, key: str, max_files: int) -> None:
    """Check the first documents of each file.

    Raises:
        UserError: a document is broken, for example not UTF-8 or without text under `key`.
    """
    reading = Reading(key)
    for file in () if corpus.plain else corpus.files[:max_files]:
        form = find_format(file.path)
        if form.kind == "text":
            if (problem := _find_invalid_utf8(file, form, 1)) is not None:
                raise problem
            continue
        single = replace(corpus, files=(file,))
        for piece, _ in islice(_located_pieces(single, {}, _CHECKED_BYTES, reading, find_cut), 1):
            for _ in texts(piece, reading):
                pass


def _texts_or_errors(piece: Piece | Documents, reading: Reading) -> Iterator[tuple[bool, str | UserError]]:
    """Yield each text, or its error, with a flag that is True if a document starts with it."""
    if isinstance(piece, Documents):
        for number, document in enumerate(piece.texts, start=piece.first):
            if isinstance(document, UserError):
                yield True, document
            elif isinstance(document, NoText):
                yield True, UserError(f"{piece.unit} {number} {document.why}", where=piece.where,
                                      instead=f"{_key_advice(document)}, or {_SKIP}")
            elif document:
                yield True, replace_surrogates(document)
    elif piece.is_jsonl:
        yield from ((True, text) for text in _line_texts(piece, reading))
    else:
        data = piece.data[len(BOM) * piece.has_mark:]
        try:
            if text := data.decode():
                yield piece.offset == 0, text
        except UnicodeDecodeError as error:
            yield True, _not_utf8(piece.path, data, error.start,
                                  piece.offset + len(BOM) * piece.has_mark + error.start)


_SKIP = "ezpz-llm data prepare … --max-broken N to skip up to N such documents"


def _key_advice(item: NoText) -> str:
    example = f", such as {item.other}" if item.other else ""
    return f"--text-key NAME if the text has another name{example}"


def _line_texts(piece: Piece, reading: Reading) -> Iterator[str | UserError]:
    offset = piece.offset + len(BOM) * piece.has_mark
    for number, data in enumerate(piece.data[len(BOM) * piece.has_mark:].split(b"\n"), start=piece.line):
        try:
            document = _parse_document(data, piece.path, number, reading.key)
        except UnicodeDecodeError as error:
            document = _not_utf8(piece.path, data, error.start, offset + error.start, number)
        if document:
            yield document
        offset += len(data) + 1


def _parse_document(data: bytes, path: Path, number: int, key: str) -> str | UserError:
    """Return the text in a line; "" for a blank line.

    Raises:
        UnicodeDecodeError: the line is not UTF-8.
    """
    where, form = f"{path}:{number}", f'each line must be an object like {{"{key}": "…"}}'
    item = parse_plain_json(data)
    is_plain = item is not None
    if not is_plain:
        line = data.decode()
        if not line.strip():
            return ""
        try:
            item = parse_json(line, where, len(line))
        except UserError as error:
            return UserError(f"line {number} is not JSON: {error.found}", where=where,
                             instead=f"{form}, or {_SKIP}")
    text = text_of(item, key)
    if isinstance(text, str):
        return text if is_plain else replace_surrogates(text)
    return UserError(f"line {number} {text.why}", where=where, instead=f"{form}; {_key_advice(text)}, or {_SKIP}")


def _not_utf8(path: Path, data: bytes, index: int, offset: int, line: int | None = None) -> UserError:
    text = looks_like_text(data)
    advice = "remove the file from the corpus" + (
        ", or convert it if it is LATIN1: iconv -f LATIN1 -t UTF-8 FILE > NEW" if text else "")
    return UserError(f"not UTF-8 text{'' if text else ', probably binary'}: byte 0x{data[index]:02x} at offset "
                     f"{offset:,}", where=str(path) if line is None else f"{path}:{line}",
                     instead=f"{advice}; or {_SKIP}")


def _located_pieces(corpus: Corpus, after: Mapping[str, Any], size: int, reading: Reading,
                    cut: Callable[[bytes], int]) -> Iterator[tuple[Piece | Documents, dict[str, Any]]]:
    """Yield each piece, and the position after it."""
    first, offset, line = after.get("file", 0), after.get("offset", 0), after.get("line", 1)
    file_bytes_read = after.get("taken", 0)
    for number, file in enumerate(corpus.files):
        if number < first:
            continue
        form = Format("text") if corpus.plain else find_format(file.path)
        if form.kind in ("parquet", "array"):
            rows = (read_rows(file.path, offset, size, reading.key) if form.kind == "parquet" else
                    read_array(file.path, form.packing, offset, size, reading.key))
            for documents in rows:
                yield documents, {"file": number, "offset": documents.first + len(documents.texts)}
        elif form.kind == "text" and reading.skip_broken and (problem := _find_invalid_utf8(file, form)):
            yield Documents(str(file.path), 0, [problem], file.size), {"file": number + 1}
        else:
            for piece in _pieces(file, form, size, offset, line, file_bytes_read, cut):
                lines = piece.data.count(b"\n") if piece.is_jsonl else 0
                file_bytes_read += piece.source_bytes
                yield piece, {"file": number, "offset": piece.offset + len(piece.data), "line": piece.line + lines,
                              "taken": file_bytes_read}
        offset, line, file_bytes_read = 0, 1, 0


def _find_invalid_utf8(file: SourceFile, form: Format, blocks: int = sys.maxsize) -> UserError | None:
    """Return the error for a text file that is not UTF-8 in its first `blocks` blocks, or None.

    The file is one document, so with --max-broken it is checked completely before any of its tokens is written.
    """
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    with open_unpacked(file.path, form.packing) as stream:
        for _ in range(blocks):
            block = stream.read(_PIECE_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=len(block) < _PIECE_BYTES)
            except UnicodeDecodeError as error:
                return _not_utf8(file.path, error.object, error.start, offset - pending + error.start)
            if len(block) < _PIECE_BYTES:
                break
            offset += len(block)
    return None


def _pieces(file: SourceFile, form: Format, size: int, offset: int, line: int, file_bytes_read: int,
            cut: Callable[[bytes], int]) -> Iterator[Piece]:
    is_jsonl = form.kind == "lines"
    carry = b""
    with open_unpacked(file.path, form.packing) as stream:
        stream.skip(offset)
        while True:
            if len(carry) > LONGEST_LINE:
                problem = "this line is longer" if is_jsonl else "the tokenizer allows no cut in a text of more"
                where = f"{file.path}:{line}" if is_jsonl else f"{file.path}, byte {offset:,}"
                raise UserError(f"{problem} than {LONGEST_LINE >> 20} MiB", where=where,
                                instead="split it, or remove it from the corpus")
            # Doubling the block while there is no position for a cut keeps the total work linear.
            block_bytes = max(size, len(carry))
            block = stream.read(block_bytes)
            data = carry + block
            end = len(data)
            if len(block) == block_bytes:
                end = data.rfind(b"\n") + 1 if is_jsonl else cut(data)
            if end:
                # The pieces of a file add up to its size, also if reading was resumed in between.
                piece_bytes = end if form.packing is None else max(0, stream.file_bytes - file_bytes_read)
                file_bytes_read += piece_bytes
                yield Piece(file.path, is_jsonl, data[:end], offset, line, piece_bytes)
            if len(block) < block_bytes:
                return
            line += data.count(b"\n", 0, end) if is_jsonl else 0
            offset += end
            carry = data[end:]
