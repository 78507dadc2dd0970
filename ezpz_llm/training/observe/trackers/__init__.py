"""Experiment trackers (TensorBoard, Weights & Biases, MLflow): `--track`, and the background thread.

Each tracker is an extra of the package. The thread passes metrics to the trackers, so that no training step waits.
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
from typing import Any

from ezpz_llm.core.base import UserError, print_lines, unknown_name_error
from ezpz_llm.core.base.records import as_plain
from ezpz_llm.core.rundir import RunDir, SideFiles
from ezpz_llm.core.rundir.layout_record import read_layout_record
from ezpz_llm.core.rundir.records import TrackerRun, read_record
from ezpz_llm.training.observe.trackers.tracker import Row, Tracker, TrackerArguments, flatten_settings

_CLOSE_WITHIN_S = 60.0
"""Maximum time in seconds to wait for the trackers when the run ends."""

_SETTINGS = ("config", "model", "parameters", "precision", "data", "environment")


class Tracking:
    """Trackers of a run on the rank that writes metrics.jsonl; empty on other ranks.

    Call `open` before the first step, `write` after each flush, and `close` at the end, even after an error. A
    thread passes the lines to the trackers. A tracker that fails is dropped with a warning, since metrics.jsonl has
    all metrics.
    """

    def __init__(self, choices: Sequence[Choice] = ()) -> None:
        self._choices = choices
        self._open: dict[str, Tracker] = {}
        self._waiting: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="trackers", daemon=True)
        self._failed = False

    def open(self, run_dir: RunDir, first_step: int, side: SideFiles | None = None) -> None:
        """Open the selected trackers, each in its folder of the run directory.

        Args:
            first_step: step of the checkpoint from which the run resumes, or 0 for a new run.

        Raises:
            UserError: a tracker cannot be opened, for example because a key is missing or the server is
                unreachable.
        """
        if not self._choices:
            return
        record = read_record(run_dir)
        earlier = record.trackers if first_step else {}
        settings = {name: as_plain(value) for name in _SETTINGS if (value := getattr(record, name)) is not None}
        if layout := read_layout_record(run_dir):
            settings["layout"] = as_plain(layout)
        for choice in self._choices:
            run_id = earlier[choice.name].run_id if choice.name in earlier else None
            arguments = TrackerArguments(run_dir.tracker(choice.name), run_dir.path.name, settings, first_step,
                                         run_id, choice.online)
            self._open[choice.name] = _open_tracker(choice, arguments)
        (side or SideFiles()).update_record(run_dir, trackers={
            choice.name: TrackerRun(online=choice.online, run_id=self._open[choice.name].run_id,
                                    folder=str(run_dir.tracker(choice.name))) for choice in self._choices})
        self._thread.start()

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Queue lines of metrics.jsonl, in order. Returns at once."""
        if self._thread.is_alive():
            rows = _rows(lines, time.time())
            self._waiting.put(lambda tracker: tracker.write(rows))

    def rewind(self, step: int) -> None:
        """Queue a rewind to an earlier step. Returns at once."""
        if self._thread.is_alive():
            self._waiting.put(lambda tracker: tracker.rewind(step))

    def close(self, failed: bool) -> None:
        """Write all queued lines and close every tracker.

        Args:
            failed: True if the run ended with an error.
        """
        if not self._thread.is_alive():
            return
        self._failed = failed
        self._waiting.put(None)
        self._thread.join(_CLOSE_WITHIN_S)
        if self._thread.is_alive():
            _warn(f"{' and '.join(self._open)} did not finish within {_CLOSE_WITHIN_S:.0f} s; metrics.jsonl is "
                  "complete")

    def _run(self) -> None:
        while (action := self._waiting.get()) is not None:
            for name, tracker in list(self._open.items()):
                try:
                    action(tracker)
                except Exception as error:  # any error of the tracker's package: the run continues without it
                    del self._open[name]
                    _warn(f"{name} failed ({_describe_error(error)}) and receives no more metrics; "
                          "metrics.jsonl has all of them")
        for name, tracker in list(self._open.items()):
            try:
                tracker.close(self._failed)
            except Exception as error:
                _warn(f"{name} could not be closed: {_describe_error(error)}")
            del self._open[name]


def _open_tracker(choice: Choice, arguments: TrackerArguments) -> Tracker:
    module = importlib.import_module(f"ezpz_llm.training.observe.trackers.{choice.name}")
    try:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        return module.open_tracker(arguments)
    except UserError:
        raise
    except Exception as error:  # each package has its own exceptions for a missing key or an unreachable server
        raise UserError(f"{choice.name} cannot be opened: {_describe_error(error)}", where="--track",
                        instead=f"--track {choice.name} to write only to the run directory" if choice.online
                        else None) from error


def _rows(lines: Sequence[Mapping[str, Any]], now: float) -> list[Row]:
    """Return the finite numbers of each line. End times are estimated backwards from `now` with the step times."""
    rows: list[Row] = []
    for line in reversed(lines):
        rows.append(Row(line["step"], now, dict(_numbers(line))))
        now -= line.get("step_time_s") or 0.0
    return rows[::-1]


def _numbers(line: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    for name, value in flatten_settings(line).items():
        if name != "step" and isinstance(value, (int, float)) and math.isfinite(value):
            yield name, float(value)


def _describe_error(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _warn(text: str) -> None:
    print_lines(f"warning: {text}")


_NEEDS = {"tensorboard": ("tensorboard",), "wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""Packages that each tracker imports. The tracker's name is also the name of its extra and its module."""
_ONLINE = "online"
_MLFLOW_SERVER = "MLFLOW_TRACKING_URI"


@dataclass(frozen=True)
class Choice:
    """Selected tracker, which writes only to the run directory unless it is `online`."""

    name: str
    online: bool


def parse_trackers(text: str | None, env: Mapping[str, str]) -> tuple[Choice, ...]:
    """Parse `--track`: comma-separated names, each as `NAME` or `NAME:online`.

    Raises:
        UserError: a tracker is unknown, named twice, not installed, or online without a server.
    """
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    choices = [_choice(word, env) for word in words]
    names = [choice.name for choice in choices]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{duplicate} is named twice", where=f"--track {text}",
                        instead=f"{duplicate} or {duplicate}:{_ONLINE}")
    return tuple(choices)


def _choice(word: str, env: Mapping[str, str]) -> Choice:
    name, colon, mode = word.partition(":")
    if name not in _NEEDS:
        raise unknown_name_error("tracker", name, _NEEDS, where="--track")
    if colon and mode != _ONLINE:
        raise UserError(f"unknown tracker mode {mode!r}", where=f"--track {word}",
                        instead=f"{name} (only in the run directory) or {name}:{_ONLINE}")
    online = bool(colon)
    if online and name == "tensorboard":
        raise UserError("TensorBoard has no online mode", where=f"--track {word}", instead=f"--track {name}")
    if online and name == "mlflow" and not env.get(_MLFLOW_SERVER):
        raise UserError(f"{_MLFLOW_SERVER} is not set", where=f"--track {word}",
                        instead=f"set {_MLFLOW_SERVER}, or pass --track {name} to write to the run directory")
    if missing := [package for package in _NEEDS[name] if find_spec(package) is None]:
        raise UserError(f"{name} requires {' and '.join(missing)} (not installed)", where=f"--track {word}",
                        instead=f"pip install 'ezpz_llm[{name}]'")
    return Choice(name, online)
