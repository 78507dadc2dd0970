"""How far `prepare` has come: kept beside the shards that it writes, so that a killed one is gone on with.

A journal is written only after the shards it speaks of are on the disk. Whatever was written after it is cut off
when the work is taken up again, so no document is lost and none is written twice.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ezpz_llm.base.outside import read_json
from ezpz_llm.base.schema import as_dataclass
from ezpz_llm.errors import UserError
from ezpz_llm.rundir import write_atomic

JOURNAL = ".journal.json"
_MOST_BYTES = 256 << 20
"""It counts every id of a vocabulary."""


class Interrupted(UserError):
    """The work ended for a reason that is not in the corpus: what was written stays, to be gone on with."""


@dataclass
class Journal:
    """The state of an unfinished folder of shards.

    Attributes:
        request: fingerprint of what is being made.
        tokenizer: its manifest entry.
        after: the place in the corpus to go on from (see `ezpz_llm.data.reader`); empty at the start.
        documents, source_bytes: begun and read so far.
        counts: how often each id occurred so far; empty for not at all.
        written: tokens and sha256 of the full shards of each split.
        read_all: the corpus is at its end, and the validation split has been copied out of the tokens.
        facts: what the source said of itself, such as the revision of a data set.
        broken: documents that were left out so far; broken_first: what is wrong with the first hundred, and where.
        marks: byte-order marks that were dropped so far.
    """

    request: str
    tokenizer: dict[str, Any]
    after: dict[str, Any] = field(default_factory=dict)
    documents: int = 0
    source_bytes: int = 0
    counts: list[int] = field(default_factory=list)
    written: dict[str, dict[str, Any]] = field(default_factory=dict)
    read_all: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    broken: int = 0
    broken_first: list[str] = field(default_factory=list)
    marks: int = 0

    @classmethod
    def load(cls, folder: Path, request: str) -> Journal | None:
        """The journal in `folder`, if there is one and it is of this request."""
        try:
            found = as_dataclass(cls, read_json(folder / JOURNAL, _MOST_BYTES), JOURNAL)
        except UserError:
            return None
        return found if found.request == request else None

    def save(self, folder: Path) -> None:
        """Replace the journal in `folder`, in one step."""
        write_atomic(folder / JOURNAL, json.dumps(asdict(self)))
