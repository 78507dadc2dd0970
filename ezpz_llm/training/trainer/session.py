"""State of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field

from ezpz_llm.training.checkpoint.saver import NotWrittenError, Saved, Saver
from ezpz_llm.training.dist import Dist, Heartbeat
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.observe import MetricsLog, StepTimeline, WallClock
from ezpz_llm.training.trainer.callbacks.callback_runner import Callbacks
from ezpz_llm.training.trainer.callbacks.spike_guard import SpikeGuard
from ezpz_llm.training.trainer.config import RunConfig
from ezpz_llm.training.trainer.early_end import EarlyEnd
from ezpz_llm.training.trainer.plan import RunPlan
from ezpz_llm.training.trainer.run_data import RunData
from ezpz_llm.training.trainer.spike_detector import SpikeDetector


@dataclass
class Checkpoints:
    """Checkpoints of a run.

    Attributes:
        written: checkpoints that this run has written.
        latest_step: step of the checkpoint that was most recently written or rolled back to.
        error: error that prevented writing the last checkpoint; None if it was written.
    """

    saver: Saver
    written: list[Saved] = field(default_factory=list)
    latest_step: int | None = None
    error: NotWrittenError | None = None


@dataclass(frozen=True)
class Stop:
    """End of a run before its last step, or its failure."""

    reason: str
    failed: bool = False


@dataclass
class Session:
    """State of a run. `first_step` is the number of finished steps when this process started."""

    plan: RunPlan
    dist: Dist
    data: RunData
    engine: Engine
    timeline: StepTimeline
    metrics: MetricsLog
    heartbeat: Heartbeat
    clock: WallClock
    early_end: EarlyEnd
    checkpoints: Checkpoints
    callbacks: Callbacks
    first_step: int
    stop: Stop | None = None

    def __post_init__(self) -> None:
        [self._guard] = self.callbacks.of_kind(SpikeGuard)

    @property
    def config(self) -> RunConfig:
        """The resolved configuration."""
        return self.plan.config

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self.callbacks.context.step

    @step.setter
    def step(self, step: int) -> None:
        self.callbacks.context._step = step

    @property
    def spikes(self) -> SpikeDetector:
        """Detector of bad steps."""
        return self._guard.detector

    @property
    def rollbacks(self) -> list[int]:
        """Checkpoint step of each rollback, in order."""
        return self._guard.rollbacks

    @property
    def has_failed(self) -> bool:
        """True if the run stopped because of a failure."""
        return self.stop is not None and self.stop.failed
