"""Detect and read the format of a corpus file: text, JSON lines, a JSON array or parquet; plain, gzip or zstd.

The content determines the format. The name decides only if the content is ambiguous: .json, .jsonl and .ndjson are
JSON, .csv and .tsv are tables. Files without documents are rejected with a message that names their format.
"""

from __future__ import annotations

import codecs
import contextlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from ezpz_llm.core.base import JsonText, UserError, import_package, open_regular, parse_json, require_package
from ezpz_llm.training.data.downloads import reading
from ezpz_llm.training.data.file_signatures import find_signature, find_signature_by_name

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Packing:
    """Compression format of a file.

    Attributes:
        new: function that creates a decompressor for one member of a file (`decompress`, `eof`, `unused_data`).
        unpack: command that decompresses a file.
    """

    name: str
    new: Callable[[], Any]
    unpack: str


_GZIP = Packing("gzip", lambda: zlib.decompressobj(16 + zlib.MAX_WBITS), "gunzip")
_ZSTD = Packing("zstd", lambda: import_package("zstandard", "reading zstd", "data")
                .ZstdDecompressor().decompressobj(), "zstd -d")


class Stream:
    """Sequential reader of a file's decompressed content, with bounded memory.

    Attributes:
        file_bytes: number of bytes of the file that were read, before decompression.
    """

    def __init__(self, path: Path, file: BinaryIO, packing: Packing | None) -> None:
        self.file_bytes = 0
        self._path, self._file, self._packing = path, file, packing
        self._member: Any = None
        self._ready = b""

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes; fewer only at the end.

        Raises:
            UserError: the compressed data is damaged or truncated.
        """
        if self._packing is None:
            block = self._file.read(size)
            self.file_bytes += len(block)
            return block
        parts, missing = [], size
        while missing and (self._ready or self._fill(self._packing)):
            part, self._ready = self._ready[:missing], self._ready[missing:]
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def skip(self, size: int) -> None:
        """Skip `size` bytes."""
        if self._packing is None:
            self._file.seek(size, 1)
            self.file_bytes += size
            return
        while size > 0 and (block := self.read(min(size, 16 * _AT_ONCE))):
            size -= len(block)

    def _fill(self, packing: Packing) -> bool:
        """Decompress the next block; return False at the end."""
        while not self._ready:
            packed = self._file.read(_AT_ONCE)
            self.file_bytes += len(packed)
            if not packed:
                if self._member is not None:
                    raise self._damaged_error(packing, "it is truncated")
                return False
            try:
                self._ready = b"".join(self._decompress(packing, packed))
            except UserError:
                raise
            except Exception as error:  # zlib.error, or the error of zstandard, which may not be installed
                raise self._damaged_error(packing, str(error)) from None
        return True

    def _decompress(self, packing: Packing, packed: bytes) -> Iterator[bytes]:
        while packed:
            if self._member is None:
                packed = packed.lstrip(b"\0")  # padding between members
                if not packed:
                    return
                self._member = packing.new()
            yield self._member.decompress(packed)
            packed = b""
            if self._member.eof:
                packed, self._member = self._member.unused_data, None

    def _damaged_error(self, packing: Packing, reason: str) -> UserError:
        return UserError(f"this {packing.name} file is damaged: {reason}", where=str(self._path),
                         instead="copy or download it again")


@contextlib.contextmanager
def open_unpacked(path: Path, packing: Packing | None) -> Iterator[Stream]:
    """Open a file to read its decompressed content.

    Raises:
        UserError: the file cannot be read.
    """
    with reading(path), open_regular(path) as file:
        yield Stream(path, file, packing)


BOM = b"\xef\xbb\xbf"
_PACKED_NAMES = (".gz", ".zst", ".zstd")
_HEAD = 1 << 16
LONGEST_LINE = 48 << 20
"""Size limit of a line, or of an item in a JSON array, in bytes; several copies of it are in memory at once."""
_PACKED = {b"\x1f\x8b": _GZIP, b"\x28\xb5\x2f\xfd": _ZSTD}
_PARQUET, _PARQUET_NAME = b"PAR1", ".parquet"
_OTHER_TEXT = {b"\xff\xfe\x00\x00": "UTF-32", b"\x00\x00\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16",
               b"\xfe\xff": "UTF-16"}
_JSON_LINES, _JSON, _TABLES = (".jsonl", ".ndjson"), ".json", (".csv", ".tsv")
_OBJECT, _ARRAY = re.compile(rb'\s*\{\s*["}]'), re.compile(rb"\s*\[\s*[{\]]")
# Control characters that text does not contain in any encoding, except in small numbers.
_NOT_TEXT = bytes(set(range(0x20)) - set(b"\t\n\r\f\b\x1b"))


@dataclass(frozen=True)
class Format:
    """Format of a file.

    Attributes:
        kind: "text" is one document, "lines" one JSON object per line, "array" a JSON array of objects.
        packing: compression; None for a plain file.
    """

    kind: Literal["text", "lines", "array", "parquet"]
    packing: Packing | None = None


def find_format(path: Path) -> Format:
    """Return the format of a file.

    Raises:
        UserError: the file contains no readable documents; the message names its format.
    """
    with reading(path), open_regular(path) as file:
        head = file.read(_HEAD)
        packing = next((packing for magic, packing in _PACKED.items() if head.startswith(magic)), None)
    if packing is None:
        if head.startswith(_PARQUET) or path.suffix.lower() == _PARQUET_NAME:
            _check_content(path, head, None)
            require_package("pyarrow", "reading parquet", "data", str(path))
            return Format("parquet")
        return Format(_text_kind(path, head, None))
    with open_unpacked(path, packing) as stream:
        head = stream.read(_HEAD)
    if head.startswith(_PARQUET):
        raise _rejection(path, f"parquet compressed with {packing.name}", f"decompress it: {packing.unpack} FILE")
    return Format(_text_kind(path, head, packing), packing)


def looks_like_text(data: bytes) -> bool:
    """Return True if bytes that are not UTF-8 may be text in another encoding."""
    return len(data) - len(data.translate(None, _NOT_TEXT)) <= len(data) // 1000


def _text_kind(path: Path, head: bytes, packing: Packing | None) -> Literal["text", "lines", "array"]:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    suffix = next((suffix for suffix in reversed(suffixes) if suffix not in _PACKED_NAMES), "")
    _check_content(path, head, packing)
    if suffix in _TABLES:
        raise _rejection(path, f"a table ({suffix})", 'write its text column as lines like {"text": "…"}, or '
                         "rename the file to .txt to read it as plain text")
    body = head.removeprefix(BOM)
    if not looks_like_text(head) and (signature := find_signature_by_name(path)):
        raise _rejection(path, signature.what, signature.instead)
    if suffix in (*_JSON_LINES, _JSON) and _ARRAY.match(body) and not _is_lines_of_arrays(path, head, packing):
        return "array"
    if suffix in _JSON_LINES:
        return "lines"
    if _OBJECT.match(body) and all(map(_is_object, _first_lines(path, head, packing))):
        return "lines"
    if suffix == _JSON:
        kind = ("one JSON object over several lines" if body.lstrip().startswith(b"{") else
                "JSON that is neither lines nor an array of objects")
        raise _rejection(path, kind, 'write lines like {"text": "…"}, or an array of such objects; or rename the '
                                    "file to .txt to read it as plain text")
    return "text"


def _check_content(path: Path, head: bytes, packing: Packing | None) -> None:
    compression = f", compressed with {packing.name}" if packing is not None else ""
    if (signature := find_signature(head)) is not None:
        raise _rejection(path, signature.what + compression, signature.instead)
    for mark, name in _OTHER_TEXT.items():
        if head.startswith(mark):
            raise UserError(f"this file is {name} text{compression}, not UTF-8", where=str(path),
                            instead=f"convert it: iconv -f {name} -t UTF-8 FILE > NEW")


def _first_lines(path: Path, head: bytes, packing: Packing | None) -> list[bytes]:
    """Return the first two non-blank lines, or one if it is longer than the head of the file."""
    lines = head.removeprefix(BOM).split(b"\n")
    if len(head) == _HEAD:
        lines.pop()  # the last line may be incomplete
        if not any(line.strip() for line in lines):
            with open_unpacked(path, packing) as stream:
                lines = stream.read(LONGEST_LINE).removeprefix(BOM).lstrip().split(b"\n")[:1]
    return [line for line in lines if line.strip()][:2]


def _is_object(line: bytes) -> bool:
    return isinstance(_try_parse(line), dict)


def _is_lines_of_arrays(path: Path, head: bytes, packing: Packing | None) -> bool:
    lines = _first_lines(path, head, packing)
    return len(lines) == 2 and all(isinstance(_try_parse(line), list) for line in lines)


def _try_parse(line: bytes) -> Any:
    try:
        return parse_json(line, "a line", len(line))
    except UserError:
        return None


def _rejection(path: Path, kind: str, instead: str) -> UserError:
    return UserError(f"this file has no readable documents: it is {kind}", where=str(path), instead=instead)


def read_array(path: Path, packing: Packing | None, first: int, size: int, key: str) -> Iterator[Documents]:
    """Yield the member `key` of each object from index `first` on, about `size` characters at a time.

    Raises:
        UserError: the file is not a complete JSON array in UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    number, previous_bytes, begin = 0, 0, first
    with open_unpacked(path, packing) as stream:
        def read_text(size: int) -> str:
            """Return the next `size` bytes as text; the decoder retains the bytes of an incomplete character."""
            data = stream.read(size)
            return decoder.decode(data, final=len(data) < size)

        text = JsonText(read_text, LONGEST_LINE)

        def members() -> Iterator[Any]:
            """Yield the text of each object from index `first` on."""
            nonlocal number, previous_bytes
            for item in text.items():
                if number < first:
                    previous_bytes = stream.file_bytes
                else:
                    yield text_of(item, key)
                number += 1
            text.end()

        try:
            for texts in gather_documents(members(), size, key):
                yield Documents(str(path), begin, texts, stream.file_bytes - previous_bytes, "item")
                begin, previous_bytes = begin + len(texts), stream.file_bytes
        except ValueError as error:
            raise UserError(f"not a complete JSON array in UTF-8: {error}", where=f"{path}, item {number}",
                            instead='copy or download it again, or write it as lines like {"text": "…"}') from None


@dataclass(frozen=True)
class NoText:
    """Item without text.

    Attributes:
        why: the reason, worded to follow the item's name in a message.
        other: key of the item's longest string, a suggestion for --text-key.
    """

    why: str
    other: str | None = None


_MAX_KEYS = 8
_KINDS = {type(None): "null", bool: "true or false", int: "a number", float: "a number", list: "a list",
          dict: "an object"}


def text_of(item: Any, key: str) -> str | NoText:
    """Return the text under `key` in a JSON item, or the reason why there is none."""
    if not isinstance(item, dict):
        return NoText(f'has no "{key}": it is {_json_type(item)}')
    if key not in item:
        keys = ", ".join(f'"{name}"' for name in list(item)[:_MAX_KEYS])
        strings = [name for name, value in item.items() if isinstance(value, str)]
        return NoText(f'has no "{key}"' + (f", but {keys}{', …' * (len(item) > _MAX_KEYS)}" if keys else ""),
                      max(strings, key=lambda name: len(item[name]), default=None))
    text = item[key]
    return text if isinstance(text, str) else NoText(f'has "{key}", but it is {_json_type(text)}, not text')


def _json_type(value: Any) -> str:
    return _KINDS.get(type(value), "a string" if isinstance(value, str) else type(value).__name__)


def gather_documents(values: Iterable[Any], size: int, key: str) -> Iterator[list[str | UserError | NoText]]:
    """Yield lists of texts, each with about `size` characters in total, from values of `key`."""
    texts: list[str | UserError | NoText] = []
    buffered = 0
    for value in values:
        text = value if isinstance(value, (str, NoText)) else text_of({key: value}, key)
        texts.append(text)
        buffered += len(text) if isinstance(text, str) else 0
        if buffered >= size:
            yield texts
            texts, buffered = [], 0
    if texts:
        yield texts


TEXT = "text"
_MAX_ROWS = 10_000
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Documents:
    """Consecutive complete documents of a file or data set.

    Attributes:
        where: name of the file or data set.
        first: index of the first document, from 0.
        texts: one entry per document; an error if the document cannot be read.
        source_bytes: bytes read for these documents, for progress.
        unit: noun for a document in messages, such as "row".
    """

    where: str
    first: int
    texts: list[str | UserError | NoText]
    source_bytes: int
    unit: str = "row"


def read_rows(path: Path, first: int, size: int, key: str = TEXT) -> Iterator[Documents]:
    """Yield the column `key` from row `first` on, about `size` bytes at a time.

    Raises:
        UserError: pyarrow is not installed, the parquet file is damaged, or there is no string column `key`.
    """
    import_package("pyarrow.parquet", "reading parquet", "data")
    import pyarrow.parquet

    with reading(path):
        try:
            with pyarrow.parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES) as parquet:
                _check_column(parquet, path, key)
                yield from _read_row_groups(parquet, path, first, size, key)
        except (pyarrow.ArrowInvalid, UnicodeDecodeError) as error:
            raise UserError(f"not a complete parquet file of UTF-8 text: {str(error).splitlines()[0]}",
                            where=str(path), instead="copy or download the file again") from error


def _read_row_groups(parquet: ParquetFile, path: Path, first: int, size: int, key: str) -> Iterator[Documents]:
    column = parquet.schema.names.index(key)
    rows, file_size, begin = max(1, parquet.metadata.num_rows), path.stat().st_size, 0
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        begin, row = begin + group.num_rows, begin
        if begin <= first:
            continue
        mean = group.column(column).total_uncompressed_size / max(1, group.num_rows)
        at_once = min(_MAX_ROWS, max(1, int(size // max(1.0, mean))))
        for batch in parquet.iter_batches(at_once, row_groups=[number], columns=[key], use_threads=False):
            values = batch.column(0)[max(0, first - row):].to_pylist()
            texts: list[str | UserError | NoText] = [text_of({key: value}, key) for value in values]
            start, row = max(row, first), row + batch.num_rows
            if texts:
                # Exact over the whole file, so that progress ends at the file's size.
                share = file_size * (start + len(texts)) // rows - file_size * start // rows
                yield Documents(str(path), start, texts, share)


def _check_column(parquet: ParquetFile, path: Path, key: str) -> None:
    import pyarrow

    schema = parquet.schema_arrow
    kind = schema.field(key).type if key in schema.names else None
    if kind is None or not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        columns = ", ".join(schema.names)
        raise UserError(f'no column "{key}" among {columns}' if kind is None else
                        f'the column "{key}" has type {kind}, not string; columns: {columns}', where=str(path),
                        instead="pass the string column that contains the documents: --text-key NAME")
