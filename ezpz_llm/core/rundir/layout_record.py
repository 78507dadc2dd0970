"""Type of layout.json, and its reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from ezpz_llm.core.base.records import Count, Ranks, as_record
from ezpz_llm.core.rundir.files import RunDir, read_json
from ezpz_llm.core.rundir.value_source_record import Sources


@dataclass(frozen=True)
class Batch:
    """Batch of one optimizer step, as `batch` in layout.json.

    Each of `dp_size` data-parallel ranks runs `accumulation` micro-batches of `micro_batch` sequences.
    `global_batch` is their product.
    """

    global_batch: Count
    micro_batch: Count
    accumulation: Count
    dp_size: Ranks


class Degrees(Struct, frozen=True):
    """Members of `layout` in layout.json that commands read without the package `layout`."""

    name: str | None = None
    tp: Ranks = 1
    pp: Ranks = 1
    sp: Ranks = 1


class LayoutRecord(Struct, frozen=True):
    """Content of layout.json."""

    layout: dict[str, Any] | None = None
    """Settings of the layout, by name; see `ezpz_llm.training.layout.layout.Layout.from_record`."""
    batch: Batch | None = None
    precision: str | None = None
    clip: float | None = None
    optimizer: dict[str, Any] = {}
    notes: list[str] = []
    sources: Sources = {}

    @property
    def degrees(self) -> Degrees:
        """Name and degrees of the layout."""
        return as_record(Degrees, self.layout or {}, "layout.json", "layout")


def read_layout_record(run_dir: RunDir) -> LayoutRecord | None:
    """Return the content of layout.json, or None if it does not exist.

    Raises:
        UserError: the file is damaged or cannot be read, or a value has the wrong type.
    """
    where = str(run_dir.layout)
    if (stored := read_json(run_dir.layout)) is None:
        return None
    record = as_record(LayoutRecord, stored, where)
    as_record(Degrees, record.layout or {}, where, "layout")
    return record
