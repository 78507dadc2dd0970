"""TensorBoard: one event file an attempt in `trackers/tensorboard`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch.utils.tensorboard import SummaryWriter

from ezpz_llm.observe.trackers.base import Opening, Row


class TensorBoard:
    """Scalars under their names in metrics.jsonl, and the run's settings as a text."""

    run_id = None

    def __init__(self, opening: Opening) -> None:
        # An earlier attempt's points beyond the step that this one goes on after are hidden by its first event.
        purge = opening.first_step + 1 if opening.first_step else None
        self._writer = SummaryWriter(str(opening.folder), purge_step=purge)
        text = json.dumps(opening.settings, indent=2, default=str)
        self._writer.add_text("settings", f"```json\n{text}\n```", opening.first_step)
        self._writer.flush()

    def write(self, rows: Sequence[Row]) -> None:
        """Write the rows through to the file."""
        for row in rows:
            for name, value in row.values.items():
                self._writer.add_scalar(name, value, row.step, walltime=row.time)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """Close the file."""
        self._writer.close()


def open_tracker(opening: Opening) -> TensorBoard:
    """A tracker that writes into `opening.folder`."""
    return TensorBoard(opening)
