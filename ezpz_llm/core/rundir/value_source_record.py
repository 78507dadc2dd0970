"""Source of a value, in run.json and layout.json."""

from __future__ import annotations

from msgspec import Struct

from ezpz_llm.core.base.records import Whole


class Source(Struct, frozen=True, omit_defaults=True):
    """Source of a value; see `ezpz_llm.training.layout.value_source.ValueSource`.

    Attributes:
        origin: a value of `Origin`, such as "preset".
    """

    origin: str
    detail: str = ""
    scaled_to: Whole | None = None


Sources = dict[str, Source]
"""Sources by the name of the value."""
