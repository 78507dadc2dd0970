"""Work after a step: validation, log, checkpoint, and evaluations. Every function is collective."""

from __future__ import annotations

from collections.abc import Sequence

from ezpz_llm.launcher.basics.variables import EVALUATING, SAMPLING
from ezpz_llm.training.evaluate.validation import validation_loss
from ezpz_llm.training.model.compile import eager
from ezpz_llm.training.trainer.callbacks.callback_checks import Registered
from ezpz_llm.training.trainer.callbacks.callback_runner import is_due
from ezpz_llm.training.trainer.checkpoint_saves import save
from ezpz_llm.training.trainer.session import Session, Stop


def after_step(session: Session) -> None:
    """Validate, log, save, and evaluate when due; after the last step, do all that are enabled."""
    config, step = session.config, session.step
    last = step == config.steps
    validates = last or is_due(step, config.eval_every)
    saves = config.save_every >= 0 and (last or is_due(step, config.save_every))
    evaluations = session.callbacks.due(step, last, validates)
    scores = [callback for callback in evaluations if callback.logs_evaluation]
    logs = saves or bool(scores) or validates or session.metrics.due
    if logs or evaluations:
        session.metrics.erase_live_line()
        with session.clock.span("training"):  # otherwise the step's time would be added to the evaluation's
            session.timeline.wait()
    if validates:
        with session.clock.span("evaluation"):
            session.dist.optional.attempt_together(f"the validation after step {step}", lambda: validate(session))
    # Write metrics before saving, so that a run that resumes from the checkpoint finds the earlier lines. If
    # scores are due, they belong on this step's line but may take minutes, so save the checkpoint first.
    if logs:
        _reduce_metrics(session)
    if logs and not scores:
        _write_metrics(session)
    # Do not save during bad steps, so that a rollback can use the last checkpoint. Always save the last step,
    # unless the run rolls back or stops there.
    if saves and (not session.spikes.streak or (last and not session.spikes.should_stop)):
        with session.clock.span("checkpoints"):
            save(session, blocking=last)
    if scores:
        try:
            with session.clock.span("evaluation"):
                evaluate(session, scores, EVALUATING)
        finally:
            _write_metrics(session)
    if others := [callback for callback in evaluations if not callback.logs_evaluation]:
        with session.clock.span("sampling"):
            evaluate(session, others, SAMPLING)


def end_early(session: Session, reason: str) -> None:
    """Write the log and, unless checkpoints are disabled, a checkpoint of this step."""
    session.stop = Stop(reason)
    flush(session)
    if session.config.save_every >= 0:
        with session.clock.span("checkpoints"):
            save(session, blocking=True)


def flush(session: Session) -> None:
    """Reduce and write the pending metrics lines."""
    _reduce_metrics(session)
    _write_metrics(session)


def _reduce_metrics(session: Session) -> None:
    """Reduce the pending metrics lines, and pass them to the callbacks."""
    with session.clock.span("logging"):
        session.metrics.reduce(session.timeline, session.callbacks.log)


def _write_metrics(session: Session) -> None:
    """Write the reduced lines, and print the callbacks' messages about them."""
    with session.clock.span("logging"):
        session.metrics.write()
    session.callbacks.context.print_messages()


def validate(session: Session) -> None:
    """Measure the validation loss on a fixed set of tokens, and record it on this step's line."""
    session.heartbeat.beat(EVALUATING, session.step)
    engine, mesh, data = session.engine, session.dist.mesh, session.data
    with engine.evaluating(), eager():
        loss, tokens = validation_loss(
            engine.loss_sum, data.validation.batches(data.batches.micro_batch, mesh.dp_rank, mesh.dp_size),
            device=engine.device, mesh=mesh)
    session.metrics.record_validation(session.step, loss, tokens)


def evaluate(session: Session, callbacks: Sequence[Registered], phase: str) -> None:
    """Call the callbacks' evaluations, with the model in evaluation mode.

    Args:
        phase: phase of the heartbeat.
    """
    for callback in callbacks:
        session.heartbeat.beat(phase, session.step)
        with session.engine.evaluating(), eager():
            session.callbacks.evaluate(callback)
