"""Trackers: other places that a run's numbers go to besides metrics.jsonl, each an extra of the package.

Their interface, the choice of `--track`, and feeding them from a thread, so that no step waits.
"""

from __future__ import annotations

import importlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ezpz_llm.base import UserError, unknown
from ezpz_llm.rundir import RunDir, SideFiles, read_layout, read_record


# What a tracker is: something that takes rows of numbers, by step, until it is closed.
@dataclass(frozen=True)
class Row:
    """The numbers of one step, by their names in metrics.jsonl, and about when it ended (epoch seconds)."""

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class Opening:
    """Arguments of a tracker.

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
    """Open tracker. `run_id` is the tracker's own name for the run; None if it has none.

    All methods may raise whatever the tracker's package raises.
    """

    run_id: str | None

    def write(self, rows: Sequence[Row]) -> None:
        """Take the rows of a flush, in order of their steps."""

    def rewind(self, step: int) -> None:
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


CLOSE_WITHIN_S = 60.0
"""Seconds that the end of a run waits for trackers still sending."""

_SETTINGS = ("config", "model", "parameters", "precision", "data", "environment")


class Tracking:
    """The trackers of a run, on the rank that writes metrics.jsonl; elsewhere it stays empty.

    `open` before the first step, `write` after each flush, `close` at the end, whatever the end is. A thread of its
    own hands the lines on. A tracker that fails is named and left out from there on: metrics.jsonl has the numbers.
    """

    def __init__(self, choices: Sequence[Choice] = ()) -> None:
        self._choices = choices
        self._open: dict[str, Tracker] = {}
        self._waiting: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._hand_on, name="trackers", daemon=True)
        self._failed = False

    def open(self, run_dir: RunDir, first_step: int, side: SideFiles | None = None) -> None:
        """Open the chosen trackers, each in its folder of the run directory; the run goes on after `first_step`.

        Raises:
            UserError: one cannot be opened, with its own reason (no key, no answer from a server).
        """
        if not self._choices:
            return
        record = read_record(run_dir)
        earlier = record.get("trackers", {}) if first_step else {}
        settings = {name: record[name] for name in _SETTINGS if name in record}
        if layout := read_layout(run_dir.layout):
            settings["layout"] = layout
        for choice in self._choices:
            opening = Opening(run_dir.tracker(choice.name), run_dir.path.name, settings, first_step,
                              earlier.get(choice.name, {}).get("run_id"), choice.online)
            self._open[choice.name] = _opened(choice, opening)
        (side or SideFiles()).update_record(run_dir, trackers={
            choice.name: {"online": choice.online, "run_id": self._open[choice.name].run_id,
                          "folder": str(run_dir.tracker(choice.name))} for choice in self._choices})
        self._thread.start()

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Take the lines of a flush (metrics.jsonl's objects, in order); returns at once."""
        if self._thread.is_alive():
            rows = _rows(lines, time.time())
            self._waiting.put(lambda tracker: tracker.write(rows))

    def rewind(self, step: int) -> None:
        """The run goes on after an earlier step; returns at once."""
        if self._thread.is_alive():
            self._waiting.put(lambda tracker: tracker.rewind(step))

    def close(self, failed: bool) -> None:
        """Hand on what waits, then finish every tracker.

        Args:
            failed: the run ended in an error.
        """
        if not self._thread.is_alive():
            return
        self._failed = failed
        self._waiting.put(None)
        self._thread.join(CLOSE_WITHIN_S)
        if self._thread.is_alive():
            _warn(f"{' and '.join(self._open)} did not end within {CLOSE_WITHIN_S:.0f} s; metrics.jsonl is whole")

    def _hand_on(self) -> None:
        while (order := self._waiting.get()) is not None:
            for name, tracker in list(self._open.items()):
                try:
                    order(tracker)
                except Exception as error:  # of any package: the run goes on without that tracker
                    del self._open[name]
                    _warn(f"{name} gets no more numbers, metrics.jsonl continues: {_words(error)}")
        for name, tracker in list(self._open.items()):
            try:
                tracker.close(self._failed)
            except Exception as error:
                _warn(f"{name} could not be closed: {_words(error)}")
            del self._open[name]


def _opened(choice: Choice, opening: Opening) -> Tracker:
    module = importlib.import_module(f"ezpz_llm.observe.trackers.{choice.name}")
    try:
        opening.folder.mkdir(parents=True, exist_ok=True)
        return module.open_tracker(opening)
    except UserError:
        raise
    except Exception as error:  # each package has its own types for a missing key or a silent server
        raise UserError(f"{choice.name} cannot be opened: {_words(error)}", where="--track",
                        instead=f"--track {choice.name} to write into the run directory alone" if choice.online
                        else None) from error


def _rows(lines: Sequence[Mapping[str, Any]], now: float) -> list[Row]:
    """The lines' finite numbers by step. The last step has just ended; those before it, as long before as the steps
    after them took."""
    rows: list[Row] = []
    for line in reversed(lines):
        rows.append(Row(line["step"], now, dict(_numbers(line))))
        now -= line.get("step_time_s") or 0.0
    return rows[::-1]


def _numbers(line: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    for name, value in flat(line).items():
        if name != "step" and isinstance(value, (int, float)) and math.isfinite(value):
            yield name, float(value)


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _warn(text: str) -> None:
    print(f"warning: {text}", flush=True)


# Which trackers `--track` names, known to be installed before a run starts.
_NEEDS = {"tensorboard": ("tensorboard",), "wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""The trackers, each also the name of its extra and of its module here, and the packages it imports."""
_ONLINE = "online"
_MLFLOW_SERVER = "MLFLOW_TRACKING_URI"


@dataclass(frozen=True)
class Choice:
    """Selected tracker, which writes only to the run directory unless it is `online`."""

    name: str
    online: bool


def choose(text: str | None, env: Mapping[str, str]) -> tuple[Choice, ...]:
    """Parse `--track`: names with commas between them, each alone or as `NAME:online`.

    Raises:
        UserError: an unknown tracker, one that is not installed, or one with no server to send to.
    """
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    choices = [_choice(word, env) for word in words]
    names = [choice.name for choice in choices]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{twice} is named twice", where=f"--track {text}", instead=f"{twice} or {twice}:{_ONLINE}")
    return tuple(choices)


def _choice(word: str, env: Mapping[str, str]) -> Choice:
    name, colon, how = word.partition(":")
    if name not in _NEEDS:
        raise unknown("tracker", name, _NEEDS, where="--track")
    if colon and how != _ONLINE:
        raise UserError(f"{how!r} is not a way to track", where=f"--track {word}",
                        instead=f"{name} (into the run directory alone) or {name}:{_ONLINE}")
    online = bool(colon)
    if online and name == "tensorboard":
        raise UserError("TensorBoard has no server to send to", where=f"--track {word}", instead=f"--track {name}")
    if online and name == "mlflow" and not env.get(_MLFLOW_SERVER):
        raise UserError(f"{_MLFLOW_SERVER} does not say which server to send to", where=f"--track {word}",
                        instead=f"set {_MLFLOW_SERVER}, or --track {name} to write into the run directory")
    if missing := [package for package in _NEEDS[name] if find_spec(package) is None]:
        raise UserError(f"{name} needs {' and '.join(missing)}, not installed here", where=f"--track {word}",
                        instead=f"pip install 'ezpz_llm[{name}]'")
    return Choice(name, online)
