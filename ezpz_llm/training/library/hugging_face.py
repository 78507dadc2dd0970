"""Callback for Hugging Face's Trainer that records its logs."""

from __future__ import annotations

import sys
from typing import Any

from ezpz_llm.core.base import UserError
from ezpz_llm.launcher.basics.variables import EVALUATING, TRAINING
from ezpz_llm.training.library.run import Run, is_current, setup


def trainer_callback() -> Any:
    """Return a `transformers.TrainerCallback` that records each training log of the Trainer. Collective.

    Calls `setup` if the script has not. The script must call `ezpz_llm.finish()` after training.

    With `logging_steps=1` every step is recorded; otherwise times are means over the steps since the last log.
    Times exclude evaluation and saves. The tokens of a step are those of `include_num_input_tokens_seen`, if it is
    set, else the samples. Further trainings continue counting after the last recorded step. Logs that cannot be
    recorded are skipped with a warning.

    Raises:
        UserError: see `setup`.
    """
    from transformers import TrainerCallback

    class Recorder(TrainingRecorder, TrainerCallback):
        """`TrainingRecorder` with the other events of the Trainer, which it ignores."""

    return Recorder(setup())


class TrainingRecorder:
    """Methods of a `transformers.TrainerCallback` that time steps and record logs, without raising errors.

    Only the last of `Run.trainings` records: a Trainer may have several recorders, and its callbacks may train
    other models.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._is_timing = False
        self._steps = self._samples = self._micro_batches = 0
        self._tokens_before, self._last_step = 0, -1
        self._last_logs: Any = None
        self._notes: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Continue after the step that the Trainer resumes from, or after the steps of an earlier training."""
        run = self._run
        self.on_train_end(args, state, control)
        run.trainings.append(self)
        self._is_timing, self._last_step = False, state.global_step
        self._reset(state)
        if not is_current(run):
            return
        if run.metrics is None:
            run.rewind(state.global_step)
        elif run.step != state.global_step:
            self._say("note", f"step {state.global_step + 1} of this training is recorded as step {run.step + 1}, "
                              "after the steps of an earlier training")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the recorder of an outer training continue."""
        if self in self._run.trainings:
            self._run.trainings.remove(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start timing, with the first step: before it, the Trainer skips the batches of earlier steps."""
        if self not in self._run.trainings:  # the callback was added during training
            self.on_train_begin(args, state, control)
        if self._is_active and not self._is_timing:
            self._is_timing = True
            self._run.step_clock.begin()
        self._run.step_clock.mark()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a micro-batch."""
        self._micro_batches += 1
        self._run.step_clock.mark()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the end of the step's work, since other callbacks may evaluate at the end of the step."""
        self._run.step_clock.mark()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a step and its samples, unless the callback was added twice and has counted them."""
        if not self._is_active or state.global_step == self._last_step:
            return
        self._last_step = state.global_step
        self._steps += 1
        self._samples += _samples(args, state, min(self._micro_batches + 1, args.gradient_accumulation_steps))
        self._micro_batches = 0
        self._run.step_clock.count_step()
        self._run.heartbeat.beat(TRAINING, self._run.step + self._steps)
        self._run.step_clock.mark()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave evaluation out of the step."""
        self._run.heartbeat.beat(EVALUATING, self._run.step)
        self._run.leave_out("evaluation")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave evaluation out of the step."""
        self._run.leave_out("evaluation")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the save out of the step."""
        self._run.leave_out("checkpoints")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None,
               **kwargs: Any) -> None:
        """Record logs with a training loss; evaluation logs and the final log have none."""
        if not logs or "loss" not in logs or not self._is_active or logs is self._last_logs:
            return
        self._last_logs = logs
        if problem := self._record(state, logs):
            self._say("warning", f"the Trainer's log of step {state.global_step} is not recorded: {problem}. "
                                 "Training continues; further logs may be missing, too")

    @property
    def _is_active(self) -> bool:
        return self._run.trainings[-1:] == [self]

    def _record(self, state: Any, logs: dict[str, Any]) -> str | None:
        """Record a log, or return the reason why it cannot be recorded."""
        if not is_current(self._run):
            return "ezpz_llm.finish() was called before the end of the training"
        if not self._steps:
            return "there is no step since the last log"
        tokens = self._samples
        if state.num_input_tokens_seen > self._tokens_before:  # of all ranks
            tokens = (state.num_input_tokens_seen - self._tokens_before) / self._run.world_size
        try:
            self._run.record(self._run.step + self._steps, logs["loss"], tokens / self._steps,
                             logs.get("learning_rate"), logs.get("grad_norm"), {})
        except UserError as error:
            return error.found
        self._reset(state)
        return None

    def _reset(self, state: Any) -> None:
        self._steps = self._samples = self._micro_batches = 0
        self._tokens_before = state.num_input_tokens_seen

    def _say(self, kind: str, text: str) -> None:
        if self._run.is_main and kind not in self._notes:
            self._notes.add(kind)
            print(f"{kind}: {text}", file=sys.stderr, flush=True)


def _samples(args: Any, state: Any, micro_batches: int) -> int:
    """Return the number of this rank's samples in a step. The last batch of an epoch may be short.

    On several ranks, accelerate fills the last batch with samples from the beginning.
    """
    from accelerate.state import GradientState

    size = state.train_batch_size or args.train_batch_size
    loader = GradientState()
    is_short = loader.end_of_dataloader and args.world_size == 1 and 0 < loader.remainder < size
    return micro_batches * size - (size - loader.remainder if is_short else 0)
