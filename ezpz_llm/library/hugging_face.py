"""Callback for Hugging Face's Trainer that records its logs."""

from __future__ import annotations

from typing import Any

from ezpz_llm.library.run import record, setup


def trainer_callback() -> Any:
    """Return a `transformers.TrainerCallback` that records each training log of the Trainer. Collective.

    Calls `setup` if the script has not. The script must call `ezpz_llm.finish()`.

    With `logging_steps=1` every step is recorded; otherwise times are means over the steps since the last log. The
    number of samples in a step is recorded as its tokens.

    Raises:
        UserError: see `setup`.
    """
    from transformers import TrainerCallback

    run = setup()

    class Recorder(TrainerCallback):
        """Callback that records losses as the Trainer reports them: the mean over ranks."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Start timing the first step."""
            run.begin_step()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None,
                   **kwargs: Any) -> None:
            """Record logs with a training loss; evaluation logs and the final log have none."""
            if logs and "loss" in logs:
                record(state.global_step, loss=logs["loss"], lr=logs.get("learning_rate"),
                       grad_norm=logs.get("grad_norm"),
                       tokens=args.train_batch_size * args.gradient_accumulation_steps)

    return Recorder()
