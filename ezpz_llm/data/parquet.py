"""The rows of a parquet file, in order, a bounded part at a time (pyarrow, the extra `data`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ezpz_llm.data.public import reading
from ezpz_llm.errors import UserError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

TEXT = "text"
_MOST_ROWS = 10_000
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Documents:
    """Some documents of a file or data set, each of them whole.

    Attributes:
        where: what they are read from.
        first: number of the first, from 0.
        texts: None for a row without text.
        source_bytes: their share of what is read, for progress.
        unit: what one of them is called there.
    """

    where: str
    first: int
    texts: list[str | None]
    source_bytes: int
    unit: str = "row"


def read_rows(path: Path, first: int, size: int, key: str = TEXT) -> Iterator[Documents]:
    """The column `key` from row `first` on, in parts of about `size` bytes.

    Raises:
        UserError: pyarrow is not installed, this is no whole parquet file, or there is no such column.
    """
    pyarrow = _pyarrow()
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
            texts = batch.column(0)[max(0, first - row):].to_pylist()
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


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("reading parquet takes pyarrow, which is not installed",
                        instead="pip install 'ezpz_llm[data]'") from error
    return pyarrow
