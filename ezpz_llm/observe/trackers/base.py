"""What a tracker is: something that takes rows of numbers, by step, until it is closed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Row:
    """The numbers of one step, by their names in metrics.jsonl, and about when it ended (epoch seconds)."""

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class Opening:
    """What a tracker is opened with.

    Args:
        folder: where it writes; it exists, inside the run directory.
        name: the run's.
        settings: what the run is, from run.json (secrets redacted).
        first_step: the step that a resumed run goes on after, 0 for a new one.
        run_id: what the tracker called this run in an earlier attempt.
        online: send to the tracker's server, as its own environment variables say.
    """

    folder: Path
    name: str
    settings: Mapping[str, Any]
    first_step: int
    run_id: str | None
    online: bool


class Tracker(Protocol):
    """One tracker, open. `run_id` is what it calls the run, None where runs have no name of its own.

    All methods may raise whatever the tracker's package raises.
    """

    run_id: str | None

    def write(self, rows: Sequence[Row]) -> None:
        """Take the rows of a flush, in order of their steps."""

    def go_back(self, step: int) -> None:
        """The run goes on after an earlier `step`: what was taken of later ones counts no more."""

    def close(self, failed: bool) -> None:
        """Finish what is still on its way."""


def flat(settings: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    """Nested settings with one dotted name each; lists stay whole."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{parent}{name}."))
        else:
            found[f"{parent}{name}"] = value
    return found
