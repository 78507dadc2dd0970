"""Hugging Face's Trainer: a callback that records what it logs."""

from __future__ import annotations

from typing import Any

from ezpz_llm.library.run import record, setup


def trainer_callback() -> Any:
    """A `transformers.TrainerCallback` that records each line that the Trainer logs; `setup` is called where nobody
    has. Collective.

    With `logging_steps=1` every step has a line; else times are means over the steps between. A line's tokens are
    the samples of the step. `ezpz_llm.finish()` is left to the script.

    Raises:
        UserError: as `setup`.
    """
    from transformers import TrainerCallback

    run = setup()

    class Recorder(TrainerCallback):
        """Records losses as the Trainer reports them, the mean over ranks."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Let the first step begin here."""
            run.begin_step()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None,
                   **kwargs: Any) -> None:
            """Record a line that has a loss of training; those of evaluations and of the end have none."""
            if logs and "loss" in logs:
                record(state.global_step, loss=logs["loss"], lr=logs.get("learning_rate"),
                       grad_norm=logs.get("grad_norm"),
                       tokens=args.train_batch_size * args.gradient_accumulation_steps)

    return Recorder()
