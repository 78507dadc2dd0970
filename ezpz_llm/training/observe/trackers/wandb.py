"""Weights & Biases tracker: online, or offline in `trackers/wandb` for a later `wandb sync`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from ezpz_llm.training.observe.trackers.tracker import Row, TrackerArguments


class _WeightsAndBiases:
    """Run with the optimizer step as x axis. A resumed attempt keeps its id."""

    def __init__(self, arguments: TrackerArguments) -> None:
        # wandb reads these when it is imported. The location of the login credentials is not changed.
        os.environ.setdefault("WANDB_CACHE_DIR", str(arguments.folder))
        os.environ.setdefault("WANDB_DATA_DIR", str(arguments.folder))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        # Do not upload facts about the machine, code, or console output; run.json and logs/ have them, without
        # secrets.
        settings = wandb.Settings(
            mode="online" if arguments.online else "offline", root_dir=str(arguments.folder), silent=True,
            console="off", disable_git=True, disable_code=True, save_code=False, x_disable_meta=True,
            x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False)
        resume: Literal["allow"] | None = "allow" if arguments.online and arguments.run_id else None
        self._wandb = wandb
        self._run = wandb.init(project=os.environ.get("WANDB_PROJECT", "ezpz_llm"), name=arguments.name,
                               id=arguments.run_id, resume=resume, config=dict(arguments.settings),
                               settings=settings)
        # wandb's own step cannot decrease, but the step of a run does when it resumes from a checkpoint.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self.run_id = self._run.id

    def write(self, rows: Sequence[Row]) -> None:
        """Send the rows to wandb's service process."""
        for row in rows:
            self._run.log({"step": row.step, **row.values})

    def rewind(self, step: int) -> None:
        """Do nothing: wandb cannot delete metrics, so repeated steps have several values."""

    def close(self, failed: bool) -> None:
        """Finish the run and stop wandb's service process."""
        self._run.finish(exit_code=int(failed))
        self._wandb.teardown()


open_tracker = _WeightsAndBiases
