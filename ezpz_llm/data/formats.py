"""Format of a corpus file, told by its content: text, JSON lines, a JSON array, parquet, plain or packed.

A name helps where the content leaves a doubt: .json, .jsonl and .ndjson hold JSON, .csv and .tsv tables. What holds
no documents is refused by its name.
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

from ezpz_llm.base import JsonText, UserError, import_package, open_regular, parse_json, require_package
from ezpz_llm.data.downloads import reading
from ezpz_llm.data.file_signatures import find_binary, find_signature

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

# Files packed by gzip or zstd, unpacked while they are read: nothing is written, memory is bounded.
_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Packing:
    """A way to pack a file.

    Attributes:
        new: makes what unpacks one member of such a file (`decompress`, `eof`, `unused_data`).
        unpack: the command that unpacks a file.
    """

    name: str
    new: Callable[[], Any]
    unpack: str


GZIP = Packing("gzip", lambda: zlib.decompressobj(16 + zlib.MAX_WBITS), "gunzip")
ZSTD = Packing("zstd", lambda: import_package("zstandard", "reading zstd", "data")
               .ZstdDecompressor().decompressobj(), "zstd -d")


class Stream:
    """A file's content from its beginning. `taken` is how many bytes of the file itself were read for it."""

    def __init__(self, path: Path, file: BinaryIO, packing: Packing | None) -> None:
        self.taken = 0
        self._path, self._file, self._packing = path, file, packing
        self._member: Any = None
        self._ready = b""

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer at the end only.

        Raises:
            UserError: what is packed is damaged or cut short.
        """
        if self._packing is None:
            block = self._file.read(size)
            self.taken += len(block)
            return block
        parts, missing = [], size
        while missing and (self._ready or self._fill(self._packing)):
            part, self._ready = self._ready[:missing], self._ready[missing:]
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def skip(self, size: int) -> None:
        """Go on as if `size` bytes had been read."""
        if self._packing is None:
            self._file.seek(size, 1)
            self.taken += size
            return
        while size > 0 and (block := self.read(min(size, 16 * _AT_ONCE))):
            size -= len(block)

    def _fill(self, packing: Packing) -> bool:
        """Unpack more; False at the end."""
        while not self._ready:
            packed = self._file.read(_AT_ONCE)
            self.taken += len(packed)
            if not packed:
                if self._member is not None:
                    raise self._damaged(packing, "it is cut short")
                return False
            try:
                self._ready = b"".join(self._unpacked(packing, packed))
            except UserError:
                raise
            except Exception as error:  # zlib.error, and zstandard's, which may not be there to name
                raise self._damaged(packing, str(error)) from None
        return True

    def _unpacked(self, packing: Packing, packed: bytes) -> Iterator[bytes]:
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

    def _damaged(self, packing: Packing, why: str) -> UserError:
        return UserError(f"this file, packed by {packing.name}, is damaged: {why}", where=str(self._path),
                         instead="copy or fetch it again")


@contextlib.contextmanager
def open_unpacked(path: Path, packing: Packing | None) -> Iterator[Stream]:
    """Open a file to read its content.

    Raises:
        UserError: it cannot be read.
    """
    with reading(path), open_regular(path) as file:
        yield Stream(path, file, packing)


# What the content of the files tells.
BOM = b"\xef\xbb\xbf"
_PACKED_NAMES = (".gz", ".zst", ".zstd")
_HEAD = 1 << 16
LONGEST_LINE = 64 << 20
"""Or an item of an array: more of one document is not kept in memory, several times over."""
_PACKED = {b"\x1f\x8b": GZIP, b"\x28\xb5\x2f\xfd": ZSTD}
_PARQUET, _PARQUET_NAME = b"PAR1", ".parquet"
_OTHER_TEXT = {b"\xff\xfe\x00\x00": "UTF-32", b"\x00\x00\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16",
               b"\xfe\xff": "UTF-16"}
_JSON_LINES, _JSON, _TABLES = (".jsonl", ".ndjson"), ".json", (".csv", ".tsv")
_OBJECT, _ARRAY = re.compile(rb'\s*\{\s*["}]'), re.compile(rb"\s*\[\s*[{\]]")
# Control characters that text has; others, if not very few, are no text's in any encoding.
_NOT_TEXT = bytes(set(range(0x20)) - set(b"\t\n\r\f\b\x1b"))


@dataclass(frozen=True)
class Format:
    """Way to read a file: format, encoding, column.

    Attributes:
        kind: "text", a document; "lines", JSON objects, one a line; "array", a JSON array of objects; "parquet".
        packing: None for none.
    """

    kind: Literal["text", "lines", "array", "parquet"]
    packing: Packing | None = None


def find_format(path: Path) -> Format:
    """The format of a file.

    Raises:
        UserError: it holds no documents that can be read here; names what it is.
    """
    with reading(path), open_regular(path) as file:
        head = file.read(_HEAD)
        packing = next((packing for magic, packing in _PACKED.items() if head.startswith(magic)), None)
    if packing is None:
        if head.startswith(_PARQUET) or path.suffix.lower() == _PARQUET_NAME:
            _check_content(path, head, None)
            require_package("pyarrow", "reading parquet", "data", str(path))
            return Format("parquet")
        return Format(_kind(path, head, None))
    with open_unpacked(path, packing) as stream:
        head = stream.read(_HEAD)
    if head.startswith(_PARQUET):
        raise _refused(path, f"parquet, packed once more by {packing.name}", f"unpack it: {packing.unpack} FILE")
    return Format(_kind(path, head, packing), packing)


def looks_like_text(data: bytes) -> bool:
    """True if bytes that are not UTF-8 may be text in another encoding."""
    return len(data) - len(data.translate(None, _NOT_TEXT)) <= len(data) // 1000


def _kind(path: Path, head: bytes, packing: Packing | None) -> Literal["text", "lines", "array"]:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    suffix = next((suffix for suffix in reversed(suffixes) if suffix not in _PACKED_NAMES), "")
    _check_content(path, head, packing)
    if suffix in _TABLES:
        raise _refused(path, f"a table ({suffix})", 'write its column of text as lines like {"text": "…"}; a file '
                       "of another name is read as it stands")
    body = head.removeprefix(BOM)
    if not looks_like_text(head) and (found := find_binary(path)):
        raise _refused(path, found.what, found.instead)
    if suffix in _JSON_LINES:
        return "lines"
    if suffix == _JSON and _ARRAY.match(body):
        return "array"
    if _OBJECT.match(body) and all(map(_is_object, _first_lines(path, head, packing))):
        return "lines"
    if suffix == _JSON:
        what = ("one JSON object over several lines" if body.lstrip().startswith(b"{") else
                "JSON that is neither lines nor an array of objects")
        raise _refused(path, what, 'lines like {"text": "…"}, or an array of such objects; a file of another name, '
                                   "such as .txt, is read as it stands")
    return "text"


def _check_content(path: Path, head: bytes, packing: Packing | None) -> None:
    inside = f", packed by {packing.name}" if packing is not None else ""
    if (found := find_signature(head)) is not None:
        raise _refused(path, found.what + inside, found.instead)
    for mark, name in _OTHER_TEXT.items():
        if head.startswith(mark):
            raise UserError(f"{name} text{inside}, not UTF-8", where=str(path),
                            instead=f"convert it: iconv -f {name} -t UTF-8 FILE > NEW")


def _first_lines(path: Path, head: bytes, packing: Packing | None) -> list[bytes]:
    """The first two lines that are not blank, or one if that is longer than the head of the file."""
    lines = head.removeprefix(BOM).split(b"\n")
    if len(head) == _HEAD:
        lines.pop()  # it may be cut
        if not any(line.strip() for line in lines):
            with open_unpacked(path, packing) as stream:
                lines = stream.read(LONGEST_LINE).removeprefix(BOM).lstrip().split(b"\n")[:1]
    return [line for line in lines if line.strip()][:2]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line, "a line", len(line)), dict)
    except UserError:
        return False


def _refused(path: Path, what: str, instead: str) -> UserError:
    return UserError(f"this file has no documents that can be read: it is {what}", where=str(path), instead=instead)


# The objects of one JSON array, in order, a bounded part of the file at a time.
def read_array(path: Path, packing: Packing | None, first: int, size: int, key: str) -> Iterator[Documents]:
    """The member `key` of each object from number `first` on, in parts of about `size` bytes.

    Raises:
        UserError: not a whole array in UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    number, taken, begin = 0, 0, first
    with open_unpacked(path, packing) as stream:
        def read(size: int) -> str:
            """The next `size` bytes as text; bytes of a character cut in two wait for the rest."""
            data = stream.read(size)
            return decoder.decode(data, final=len(data) < size)

        text = JsonText(read, LONGEST_LINE)

        def members() -> Iterator[Any]:
            """The text of each object from number `first` on."""
            nonlocal number, taken
            for item in text.items():
                if number < first:
                    taken = stream.taken
                else:
                    yield text_of(item, key)
                number += 1
            text.end()

        try:
            for texts in gathered(members(), size, key):
                yield Documents(str(path), begin, texts, stream.taken - taken, "item")
                begin, taken = begin + len(texts), stream.taken
        except ValueError as error:
            raise UserError(f"not a whole JSON array in UTF-8: {error}", where=f"{path}, item {number}",
                            instead='copy or fetch it again, or write it as lines like {"text": "…"}') from None


@dataclass(frozen=True)
class NoText:
    """Item without text.

    Attributes:
        why: follows its name in a message.
        other: the key of its longest string.
    """

    why: str
    other: str | None = None


_MOST_KEYS = 8
_KINDS = {type(None): "null", bool: "true or false", int: "a number", float: "a number", list: "a list",
          dict: "an object"}


def text_of(item: Any, key: str) -> str | NoText:
    """The text that an item of JSON has under `key`."""
    if not isinstance(item, dict):
        return NoText(f'has no "{key}": it is {_kind_of(item)}')
    if key not in item:
        keys = ", ".join(f'"{name}"' for name in list(item)[:_MOST_KEYS])
        strings = [name for name, value in item.items() if isinstance(value, str)]
        return NoText(f'has no "{key}"' + (f", but {keys}{', …' * (len(item) > _MOST_KEYS)}" if keys else ""),
                      max(strings, key=lambda name: len(item[name]), default=None))
    text = item[key]
    return text if isinstance(text, str) else NoText(f'has "{key}", but it is {_kind_of(text)}, not text')


def _kind_of(value: Any) -> str:
    return _KINDS.get(type(value), "a string" if isinstance(value, str) else type(value).__name__)


def gathered(found: Iterable[Any], size: int, key: str) -> Iterator[list[str | UserError | NoText]]:
    """Texts of together about `size` characters, from the values under `key`."""
    texts: list[str | UserError | NoText] = []
    buffered = 0
    for value in found:
        text = value if isinstance(value, (str, NoText)) else text_of({key: value}, key)
        texts.append(text)
        buffered += len(text) if isinstance(text, str) else 0
        if buffered >= size:
            yield texts
            texts, buffered = [], 0
    if texts:
        yield texts


# The rows of a parquet file, in order, a bounded part at a time (pyarrow, the extra `data`).
TEXT = "text"
_MOST_ROWS = 10_000
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Documents:
    """Some documents of a file or data set, each of them whole.

    Attributes:
        where: what they are read from.
        first: number of the first, from 0.
        texts: an error for a document that cannot be read.
        source_bytes: their share of what is read, for progress.
        unit: what one of them is called there.
    """

    where: str
    first: int
    texts: list[str | UserError | NoText]
    source_bytes: int
    unit: str = "row"


def read_rows(path: Path, first: int, size: int, key: str = TEXT) -> Iterator[Documents]:
    """The column `key` from row `first` on, in parts of about `size` bytes.

    Raises:
        UserError: pyarrow is not installed, this is no whole parquet file, or there is no such column.
    """
    import_package("pyarrow.parquet", "reading parquet", "data")
    import pyarrow.parquet

    with reading(path):
        try:
            with pyarrow.parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES) as parquet:
                _check_column(parquet, path, key)
                yield from _groups(parquet, path, first, size, key)
        except (pyarrow.ArrowInvalid, UnicodeDecodeError) as error:
            raise UserError(f"not a whole parquet file of UTF-8 text: {str(error).splitlines()[0]}",
                            where=str(path), instead="copy or fetch the file again") from error


def _groups(parquet: ParquetFile, path: Path, first: int, size: int, key: str) -> Iterator[Documents]:
    column = parquet.schema.names.index(key)
    rows, file_size, begin = max(1, parquet.metadata.num_rows), path.stat().st_size, 0
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        begin, row = begin + group.num_rows, begin
        if begin <= first:
            continue
        mean = group.column(column).total_uncompressed_size / max(1, group.num_rows)
        at_once = min(_MOST_ROWS, max(1, int(size // max(1.0, mean))))
        for batch in parquet.iter_batches(at_once, row_groups=[number], columns=[key], use_threads=False):
            values = batch.column(0)[max(0, first - row):].to_pylist()
            texts: list[str | UserError | NoText] = [text_of({key: value}, key) for value in values]
            start, row = max(row, first), row + batch.num_rows
            if texts:
                # To the byte over the whole file, so that progress ends at its size.
                share = file_size * (start + len(texts)) // rows - file_size * start // rows
                yield Documents(str(path), start, texts, share)


def _check_column(parquet: ParquetFile, path: Path, key: str) -> None:
    import pyarrow

    schema = parquet.schema_arrow
    kind = schema.field(key).type if key in schema.names else None
    if kind is None or not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        state = "no column" if kind is None else f"a column of {kind}, not of strings, called"
        raise UserError(f'{state} "{key}" among {", ".join(schema.names)}', where=str(path),
                        instead="--text-key NAME, where NAME is the column of strings that has the documents")
