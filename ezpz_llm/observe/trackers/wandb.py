"""Weights & Biases: offline in `trackers/wandb`, to be sent later with `wandb sync`, or online if asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from ezpz_llm.observe.trackers import Opening, Row


class WeightsAndBiases:
    """Run whose id a resumed attempt keeps. Its x axis is the optimizer step."""

    def __init__(self, opening: Opening) -> None:
        # Its packages read these when they are imported. Where it keeps a login is left to the user.
        os.environ.setdefault("WANDB_CACHE_DIR", str(opening.folder))
        os.environ.setdefault("WANDB_DATA_DIR", str(opening.folder))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        # Machine, code and console stay out: run.json and logs/ have them, without secrets.
        settings = wandb.Settings(
            mode="online" if opening.online else "offline", root_dir=str(opening.folder), silent=True,
            console="off", disable_git=True, disable_code=True, save_code=False, x_disable_meta=True,
            x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False)
        resume: Literal["allow"] | None = "allow" if opening.online and opening.run_id else None
        self._wandb = wandb
        self._run = wandb.init(project=os.environ.get("WANDB_PROJECT", "ezpz_llm"), name=opening.name,
                               id=opening.run_id, resume=resume, config=dict(opening.settings), settings=settings)
        # The package's own step cannot go back, as that of a run does when it resumes from a checkpoint.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self.run_id = self._run.id

    def write(self, rows: Sequence[Row]) -> None:
        """Hand the rows to the package's own process."""
        for row in rows:
            self._run.log({"step": row.step, **row.values})

    def rewind(self, step: int) -> None:
        """Nothing can be taken back: steps that come again stand beside the earlier ones."""

    def close(self, failed: bool) -> None:
        """Finish the run and end the package's own process."""
        self._run.finish(exit_code=int(failed))
        self._wandb.teardown()


open_tracker = WeightsAndBiases
