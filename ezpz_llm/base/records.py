"""Records in private folders: each a JSON file that stands for one dataclass."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from ezpz_llm.base.outside import MOST_BYTES, parse_json
from ezpz_llm.base.private import open_private
from ezpz_llm.base.schema import as_dataclass
from ezpz_llm.errors import UserError

Record = TypeVar("Record")


def read_records(kind: type[Record], folder: Path, begin: str, most: int = MOST_BYTES) -> list[Record]:
    """The records of `kind` in the files whose names begin so, in their order. What is not such a record, is just
    being written, or was put there by another user is passed over, as is a folder that is not private."""
    found = []
    try:
        with open_private(folder) as opened:
            for name in opened.names(begin):
                where = str(folder / name)
                try:
                    found.append(as_dataclass(kind, parse_json(opened.read(name, most), where), where))
                except (OSError, UserError):
                    continue
    except OSError:
        return []
    return found
