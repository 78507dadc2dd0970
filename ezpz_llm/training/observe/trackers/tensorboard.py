"""TensorBoard tracker: one event file per attempt in `trackers/tensorboard`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch.utils.tensorboard import SummaryWriter

from ezpz_llm.training.observe.trackers.tracker import Row, TrackerArguments


class TensorBoard:
    """Writer of scalars under their names in metrics.jsonl, and of the run's settings as text."""

    run_id = None

    def __init__(self, arguments: TrackerArguments) -> None:
        self._folder = str(arguments.folder)
        self._begin(arguments.first_step)
        text = json.dumps(arguments.settings, indent=2, default=str)
        self._writer.add_text("settings", f"```json\n{text}\n```", arguments.first_step)
        self._writer.flush()

    def write(self, rows: Sequence[Row]) -> None:
        """Write the rows and flush the file."""
        for row in rows:
            for name, value in row.values.items():
                self._writer.add_scalar(name, value, row.step, walltime=row.time)
        self._writer.flush()

    def rewind(self, step: int) -> None:
        """Start a new event file, which hides later points of earlier files."""
        self._writer.close()
        self._begin(step)

    def _begin(self, first_step: int) -> None:
        # purge_step: the first event of this file hides points from that step on in earlier files.
        self._writer = SummaryWriter(self._folder, purge_step=first_step + 1 if first_step else None)

    def close(self, failed: bool) -> None:
        """Close the file."""
        self._writer.close()


open_tracker = TensorBoard
