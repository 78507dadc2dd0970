"""Interface of a tracker, and what it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Row:
    """Metrics of one step, by their names in metrics.jsonl, and the approximate epoch time of its end."""

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class TrackerArguments:
    """Arguments of a tracker.

    Args:
        folder: existing folder in the run directory for the tracker's files.
        name: name of the run.
        settings: settings of the run from run.json, with secrets redacted.
        first_step: step of the checkpoint from which the run resumes, or 0 for a new run.
        run_id: the tracker's id of this run in an earlier attempt.
        online: send to the server that the tracker's environment variables name.
    """

    folder: Path
    name: str
    settings: Mapping[str, Any]
    first_step: int
    run_id: str | None
    online: bool


class Tracker(Protocol):
    """Interface of an open tracker. `run_id` is the tracker's id of the run, or None.

    All methods may raise any exception of the tracker's package.
    """

    run_id: str | None

    def write(self, rows: Sequence[Row]) -> None:
        """Write the rows of a flush, which are sorted by step."""

    def rewind(self, step: int) -> None:
        """Discard the rows after `step`, before the run continues from there."""

    def close(self, failed: bool) -> None:
        """Flush pending output and close the tracker."""


def flatten_settings(settings: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted names. Lists are kept."""
    flattened: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flattened.update(flatten_settings(value, f"{parent}{name}."))
        else:
            flattened[f"{parent}{name}"] = value
    return flattened
