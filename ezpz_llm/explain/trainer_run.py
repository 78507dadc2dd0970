"""Facts about a run of the trainer that advice depends on, read from its directory (imports no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ezpz_llm.base import UserError, as_dataclass
from ezpz_llm.base.records import as_record
from ezpz_llm.layout.batch import Batch
from ezpz_llm.layout.layout import Layout
from ezpz_llm.layout.optimizers import OptimizerName
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.rundir import RunDir
from ezpz_llm.rundir.layout_record import LayoutRecord
from ezpz_llm.rundir.records import Device, RunRecord


@dataclass(frozen=True)
class TrainerRun:
    """Run of the trainer.

    Attributes:
        config: the trainer's settings, by name.
    """

    model: ModelConfig
    layout: Layout
    batch: Batch
    world_size: int
    config: Mapping[str, Any]
    precision: str | None
    optimizer: OptimizerName
    device: Device


def read_trainer_run(run_dir: RunDir, record: RunRecord, layout: LayoutRecord | None) -> TrainerRun | None:
    """Return the facts from a run's records, or None for a program other than the trainer.

    Raises:
        UserError: layout.json is missing or incomplete, or a value is invalid.
    """
    if record.model is None or record.config is None:
        return None
    if layout is None or layout.batch is None:
        raise UserError("layout.json is missing" if layout is None else "layout.json has no batch",
                        where=str(run_dir.path), instead="a complete run directory")
    where = str(run_dir.record)
    return TrainerRun(
        as_dataclass(ModelConfig, record.model, where), Layout.from_record(layout.layout, str(run_dir.layout)),
        layout.batch, record.world_size or 1, record.config, layout.precision,
        as_record(OptimizerName, record.settings.optimizer or "adamw", where, "config.optimizer"),
        record.environment.device if record.environment else Device())
