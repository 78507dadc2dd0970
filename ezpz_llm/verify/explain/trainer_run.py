"""Facts about a run of the trainer that advice depends on, read from its directory (imports no torch)."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from ezpz_llm.core.base import UserError, as_dataclass
from ezpz_llm.core.base.records import Step, Whole, as_record
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.layout_record import LayoutRecord
from ezpz_llm.core.rundir.records import Device, RunRecord
from ezpz_llm.training.layout.batch import Batch
from ezpz_llm.training.layout.layout import Layout
from ezpz_llm.training.layout.optimizers import OptimizerName
from ezpz_llm.training.model.config import ModelConfig


class Settings(Struct, frozen=True):
    """Members of `config` in run.json that advice depends on (`ezpz_llm.training.trainer.config.TrainConfig`)."""

    steps: Step | None = None
    save_every: Whole = 0
    eval_every: Whole = 0
    sample_every: Whole = 0
    log_every: Whole = 0
    eval_tokens: Whole | None = None
    save_async: bool = True
    compile: bool | None = None
    optimizer: OptimizerName = "adamw"


@dataclass(frozen=True)
class TrainerRun:
    """Run of the trainer."""

    model: ModelConfig
    layout: Layout
    batch: Batch
    world_size: int
    settings: Settings
    precision: str | None
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
        layout.batch, record.world_size or 1, as_record(Settings, record.config, where, "config"), layout.precision,
        record.environment.device if record.environment else Device())
