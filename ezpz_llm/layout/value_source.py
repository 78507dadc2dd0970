"""Source of a run's value, as a kind and in words (imports no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Origin(Enum):
    """Kinds of sources, in the order in which settings are listed, and how they are put into words."""

    COMMAND_LINE = "command line"
    FILE = "{}"
    """A YAML file or a ds_config, named by its path; and what has no kind of its own."""
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
        """Place in the list; also the precedence of batch numbers, the least first."""
        return list(Origin).index(self)


_TYPED = " (its command line)"


@dataclass(frozen=True)
class ValueSource:
    """Where a value came from; its words are for people, and in run.json.

    Attributes:
        detail: which file, run, preset, model or other value.
    """

    origin: Origin
    detail: str = ""

    def __str__(self) -> str:
        return self.origin.value.format(self.detail)

    @classmethod
    def read(cls, words: str) -> ValueSource:
        """Return the source that run.json has in words."""
        for origin in Origin:
            begin, blank, _ = origin.value.partition("{}")
            if begin and (words.startswith(begin) if blank else words == begin):
                return cls(origin, words.removeprefix(begin))
        return cls(Origin.FILE, words)

    @classmethod
    def read_all(cls, words: Mapping[str, str]) -> dict[str, ValueSource]:
        """Return the sources that run.json has, by the names of values."""
        return {name: cls.read(str(one)) for name, one in words.items()}

    @classmethod
    def of_run(cls, path: object, before: ValueSource) -> ValueSource:
        """Return the source of a value that is a resumed run's own, which had it from `before`."""
        return cls(Origin.RUN, f"{path}{_TYPED if before.is_typed else ''}")

    @property
    def is_typed(self) -> bool:
        """Was it typed, for this run or for the one that is resumed? No ds_config wins over it."""
        return self.origin is Origin.COMMAND_LINE or (self.origin is Origin.RUN and self.detail.endswith(_TYPED))


COMMAND_LINE, DEFAULT = ValueSource(Origin.COMMAND_LINE), ValueSource(Origin.DEFAULT)
UNASKED = (Origin.DEFAULT, Origin.PRESET, Origin.RECIPE)
"""What a value that somebody wrote for this run, DeepSpeed's default for a ds_config among it, wins over."""
