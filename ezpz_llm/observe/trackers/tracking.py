"""Feeding the trackers from behind the training: no step waits for one, and none can end a run."""

from __future__ import annotations

import importlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ezpz_llm.errors import UserError
from ezpz_llm.observe.trackers.base import Opening, Row, Tracker, flat
from ezpz_llm.observe.trackers.choice import Choice
from ezpz_llm.rundir import RunDir, SideFiles, read_layout, read_record

CLOSE_WITHIN_S = 60.0
"""How long the end of a run waits for trackers that are still sending."""

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

    def go_back(self, step: int) -> None:
        """The run goes on after an earlier step; returns at once."""
        if self._thread.is_alive():
            self._waiting.put(lambda tracker: tracker.go_back(step))

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
                    _warn(f"{name} gets no more numbers, metrics.jsonl goes on: {_words(error)}")
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
