"""Source of a run's value, as a kind and as text (imports no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Origin(Enum):
    """Kinds of sources, in the order in which settings are listed, with their text."""

    COMMAND_LINE = "command line"
    FILE = "{}"
    """Path of a YAML file or ds_config, or any other text."""
    RUN = "run {}"
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


_TYPED = " (its command line)"


@dataclass(frozen=True)
class ValueSource:
    """Source of a value; its text is shown to users and stored in run.json.

    Attributes:
        detail: name of the file, run, preset, model or other value.
    """

    origin: Origin
    detail: str = ""

    def __str__(self) -> str:
        return self.origin.value.format(self.detail)

    @classmethod
    def read(cls, words: str) -> ValueSource:
        """Parse the text of a source in run.json."""
        for origin in Origin:
            begin, blank, _ = origin.value.partition("{}")
            if begin and (words.startswith(begin) if blank else words == begin):
                return cls(origin, words.removeprefix(begin))
        return cls(Origin.FILE, words)

    @classmethod
    def read_all(cls, words: Mapping[str, str]) -> dict[str, ValueSource]:
        """Parse the sources in run.json, by the names of values."""
        return {name: cls.read(str(text)) for name, text in words.items()}

    @classmethod
    def of_run(cls, path: object, before: ValueSource) -> ValueSource:
        """Return the source of a value that a resumed run keeps; `before` is its original source."""
        return cls(Origin.RUN, f"{path}{_TYPED if before.is_typed else ''}")

    @property
    def is_typed(self) -> bool:
        """True if the value was typed for this run or the resumed one; it then overrides the ds_config."""
        return self.origin is Origin.COMMAND_LINE or (self.origin is Origin.RUN and self.detail.endswith(_TYPED))


COMMAND_LINE, DEFAULT = ValueSource(Origin.COMMAND_LINE), ValueSource(Origin.DEFAULT)
NOT_FROM_USER = (Origin.DEFAULT, Origin.PRESET, Origin.RECIPE)
"""Sources that any value of a run's files overrides, even DeepSpeed's default for a key missing in a ds_config."""
