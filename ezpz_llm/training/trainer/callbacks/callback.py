"""Base class of callbacks, and the state of a run that they see (imports no torch)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ezpz_llm.core.base import print_lines
from ezpz_llm.training.trainer.callbacks.metric_values import RESERVED_METRICS, check_metric

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ezpz_llm.training.dist import Dist
    from ezpz_llm.training.observe import MetricsLog
    from ezpz_llm.training.trainer.run_data import RunData


class CallbackContext:
    """State of a run, as its callbacks see it. All calls get the same object, whose attributes are read-only.

    Attributes:
        dist: rank, world size, device, process groups, and run directory.
        module: this rank's part of the model, whose parameters the layout may have partitioned.
        total_steps: number of steps of the whole run.
    """

    def __init__(self, dist: Dist, module: nn.Module, step: int, total_steps: int, data: RunData,
                 metrics: MetricsLog) -> None:
        self.dist, self.module, self.total_steps = dist, module, total_steps
        self._step = step
        self._data, self._metrics = data, metrics
        self._messages: list[str] = []
        self._holds_messages = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) and not name.startswith("_"):
            raise AttributeError(f"context.{name} is read-only")
        super().__setattr__(name, value)

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self._step

    @property
    def tokens(self) -> int:
        """Number of training tokens that the run has consumed, over all ranks."""
        return self._data.consumed_tokens

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Latest logged line of metrics.jsonl, the same on every rank except for times; empty before the first."""
        return MappingProxyType(self._metrics.latest)

    def log(self, name: str, value: float | Tensor | None) -> None:
        """Add a metric of rank 0 to the last step's line of metrics.jsonl, and to the trackers.

        Call it in `on_step_end`, `on_log`, or `on_evaluate`. A 0-d tensor is copied on its device and read when the
        steps are logged, so that the call does not wait for the device. NaN and Inf become null.

        Raises:
            ValueError: the metric is one of the trainer's, is neither a number nor a tensor of one element, or the
                step's line has been written.
        """
        check_metric(name, value)
        if name in RESERVED_METRICS:
            raise ValueError(f"{name} is a metric of the trainer; choose another name")
        tensor: Any = value
        number = value if value is None or isinstance(value, int) else (
            float(value) if isinstance(value, Real) else tensor.detach().clone())
        self._metrics.record_task(self.step, **{name: number})

    def print(self, text: str) -> None:
        """Print a message on rank 0, above the progress line. In `on_log`, it follows the steps' progress lines."""
        if not self.dist.is_main:
            return
        if self._holds_messages:
            self._messages.append(text)
        else:
            self._metrics.erase_live_line()
            print_lines(text, keeps_colors=True)

    @contextmanager
    def held_messages(self) -> Iterator[None]:
        """Hold messages in this context until `print_messages`."""
        self._holds_messages = True
        try:
            yield
        finally:
            self._holds_messages = False

    def print_messages(self) -> None:
        """Print the held messages."""
        messages, self._messages = self._messages, []
        for text in messages:
            print_lines(text, keeps_colors=True)


class Callback:
    """Extension of a training run. Subclasses override the methods that they need; the others do nothing.

    Every rank calls the same methods of the same callbacks in the same order, so that they may use collectives.
    `on_step_begin` and `on_step_end` run in every step, and should not wait for the device. An exception ends the
    run.

    Attributes:
        name: unique name, the key of the callback's state in checkpoints; by default, the name of its entry point
            or its class.
        package: package and version, for messages; set for callbacks with an entry point.
        evaluate_every: steps between calls of `on_evaluate`, which is also called after the last step. 0: only
            after the last step; None: after each validation (`--eval-every`).
        logs_evaluation: False if `on_evaluate` logs no metrics, so that the step's line is written before it.
    """

    name: str = ""
    package: str = ""
    evaluate_every: int | None = None
    logs_evaluation: bool = True

    def on_step_begin(self, context: CallbackContext) -> None:
        """Prepare for the next step."""

    def on_step_end(self, context: CallbackContext) -> None:
        """Use the finished step, before its metrics are reduced. The device may still be executing the step."""

    def on_log(self, context: CallbackContext, lines: Sequence[dict[str, Any]]) -> None:
        """Use the steps since the last log, or add metrics to them, before they are written to metrics.jsonl.

        Args:
            lines: one line per step, the same on every rank except for times.
        """

    def on_evaluate(self, context: CallbackContext) -> None:
        """Evaluate the model, which is in evaluation mode, without gradients. A due checkpoint has been written."""

    def on_save(self, context: CallbackContext, folder: Path) -> None:
        """Use a complete checkpoint, which may be several steps old if it was written in the background."""

    def on_train_end(self, context: CallbackContext) -> None:
        """Finish, after the last step or an early end. Not called after an exception."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints, as JSON values. The state of rank 0 is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint, on every rank, when a run resumes or rolls back."""
