"""Source of a run's value, as an origin with a detail (imports no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ezpz_llm.rundir.value_source_record import Source


class Origin(Enum):
    """Kinds of sources, in the order in which settings are listed, with their text."""

    COMMAND_LINE = "command line"
    FILE = "{}"
    """Path of a YAML file or ds_config, or any other text."""
    RUN = "run {}"
    RUN_TYPED = "run {} (its command line)"
    """Value that was typed for the run that is resumed."""
    WEIGHTS = "weights to begin with"
    PRESET = "preset {}"
    RECIPE = "recipe of {}"
    FINE_TUNING = "fine-tuning"
    MODEL = "model {}"
    DERIVED = "follows from {}"
    TENTH = "a tenth of {}"
    DEFAULT = "default"

    @property
    def rank(self) -> int:
        """Position in the list, which is also the precedence of batch numbers: the lowest rank wins."""
        return list(Origin).index(self)


@dataclass(frozen=True)
class ValueSource:
    """Source of a value.

    Attributes:
        detail: name of the file, run, preset, model or other value.
        scaled_to: number of steps to which a value of a longer recipe was scaled.
    """

    origin: Origin
    detail: str = ""
    scaled_to: int | None = None

    def __str__(self) -> str:
        scaled = "" if self.scaled_to is None else f", in proportion to {self.scaled_to} steps"
        return self.origin.value.format(self.detail) + scaled

    def as_record(self) -> Source:
        """Return the source for run.json and layout.json."""
        return Source(origin=self.origin.name.lower(), detail=self.detail, scaled_to=self.scaled_to)

    @classmethod
    def from_record(cls, source: Source | str) -> ValueSource:
        """Return a recorded source. One of another version may be a sentence, or have an unknown origin."""
        if isinstance(source, str):
            return cls(Origin.FILE, source)
        return cls(_ORIGINS.get(source.origin, Origin.FILE), source.detail, source.scaled_to)

    @classmethod
    def of_run(cls, path: object, before: ValueSource) -> ValueSource:
        """Return the source of a value that a resumed run keeps; `before` is its original source."""
        return cls(Origin.RUN_TYPED if before.is_typed else Origin.RUN, str(path))

    @property
    def is_typed(self) -> bool:
        """True if the value was typed for this run or the resumed one; it then overrides the ds_config."""
        return self.origin in (Origin.COMMAND_LINE, Origin.RUN_TYPED)


_ORIGINS = {origin.name.lower(): origin for origin in Origin}
COMMAND_LINE, DEFAULT = ValueSource(Origin.COMMAND_LINE), ValueSource(Origin.DEFAULT)
NOT_FROM_USER = (Origin.DEFAULT, Origin.PRESET, Origin.RECIPE)
"""Sources that any value of a run's files overrides, even DeepSpeed's default for a key missing in a ds_config."""
