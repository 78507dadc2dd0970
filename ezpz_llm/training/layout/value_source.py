"""Source of a run's value, as an origin with a detail (imports no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ezpz_llm.core.rundir.value_source_record import Source, Sources


class Origin(Enum):
    """Kinds of sources, in the order in which settings are listed."""

    COMMAND_LINE = "command_line"
    FILE = "file"
    """Path of a YAML file, or any other text."""
    DS_CONFIG = "ds_config"
    DS_CONFIG_SHARE = "ds_config_share"
    """Fraction of the learning rate, in the ds_config."""
    DEEPSPEED_DEFAULT = "deepspeed_default"
    """DeepSpeed's default for a key that the ds_config does not set."""
    RUN = "run"
    RUN_TYPED = "run_typed"
    """Value that was typed for the run that is resumed."""
    WEIGHTS = "weights"
    PRESET = "preset"
    RECIPE = "recipe"
    FINE_TUNING = "fine_tuning"
    MODEL = "model"
    DERIVED = "derived"
    TENTH = "tenth"
    DEFAULT = "default"

    @property
    def rank(self) -> int:
        """Position in the list, which is also the precedence of batch numbers: the lowest rank wins."""
        return list(Origin).index(self)


_TEXTS = {
    Origin.COMMAND_LINE: "command line",
    Origin.FILE: "{}",
    Origin.DS_CONFIG: "{}",
    Origin.DS_CONFIG_SHARE: "a share of lr in {}",
    Origin.DEEPSPEED_DEFAULT: "DeepSpeed's default, not set in {}",
    Origin.RUN: "run {}",
    Origin.RUN_TYPED: "run {} (its command line)",
    Origin.WEIGHTS: "weights to begin with",
    Origin.PRESET: "preset {}",
    Origin.RECIPE: "recipe of {}",
    Origin.FINE_TUNING: "fine-tuning",
    Origin.MODEL: "model {}",
    Origin.DERIVED: "follows from {}",
    Origin.TENTH: "a tenth of {}",
    Origin.DEFAULT: "default",
}


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
        return _TEXTS[self.origin].format(self.detail) + scaled

    def as_record(self) -> Source:
        """Return the source for run.json and layout.json."""
        return Source(origin=self.origin.value, detail=self.detail, scaled_to=self.scaled_to)

    @classmethod
    def from_record(cls, source: Source) -> ValueSource:
        """Return a recorded source. A later version may have recorded an unknown origin."""
        is_known = source.origin in {origin.value for origin in Origin}
        return cls(Origin(source.origin) if is_known else Origin.FILE, source.detail, source.scaled_to)

    @classmethod
    def of_run(cls, path: object, before: ValueSource) -> ValueSource:
        """Return the source of a value that a resumed run keeps; `before` is its original source."""
        return cls(Origin.RUN_TYPED if before.is_typed else Origin.RUN, str(path))

    @property
    def is_typed(self) -> bool:
        """True if the value was typed for this run or the resumed one; it then overrides the ds_config."""
        return self.origin in (Origin.COMMAND_LINE, Origin.RUN_TYPED)


def read_sources(sources: Sources | None) -> dict[str, ValueSource]:
    """Return the sources in a record by the name of the value, none if it has none."""
    return {name: ValueSource.from_record(source) for name, source in (sources or {}).items()}


COMMAND_LINE, DEFAULT = ValueSource(Origin.COMMAND_LINE), ValueSource(Origin.DEFAULT)
NOT_FROM_USER = (Origin.DEFAULT, Origin.PRESET, Origin.RECIPE)
"""Sources that any value of a run's files overrides, even DeepSpeed's default for a key missing in a ds_config."""
FROM_DS_CONFIG = (Origin.DS_CONFIG, Origin.DS_CONFIG_SHARE, Origin.DEEPSPEED_DEFAULT)
"""Sources of values that a ds_config determines."""
