"""Checkpoints that a run saves. Every function but `checkpoint_cost` is collective."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict

from ezpz_llm.core.base import print_lines
from ezpz_llm.core.rundir.records import CheckpointCost
from ezpz_llm.launcher.basics.variables import SAVING
from ezpz_llm.training import checkpoint
from ezpz_llm.training.trainer.callbacks.spike_guard import SpikeGuard
from ezpz_llm.training.trainer.session import Session


def save(session: Session, *, blocking: bool = False) -> None:
    """Start writing the checkpoint of this step; with `blocking`, return when it is complete.

    If it cannot be written, print a warning and continue training; the next checkpoint is written when it is due.
    At the end of a run there is no next one, so `finish` reports the error.
    """
    session.heartbeat.beat(SAVING, session.step)
    finish_save(session)
    if session.checkpoints.latest_step == session.step:
        return
    session.data.position = session.data.position.agree(session.dist)
    saver, progress = session.checkpoints.saver, _progress(session)

    def start() -> checkpoint.Saved | None:
        """Start saving; return the checkpoint if it is complete."""
        note = saver.start(session.engine, progress, at_once=blocking)
        if note and session.dist.is_main:
            session.metrics.erase_live_line()
            print_lines(f"note: checkpoints are not written in the background: {note}")
        return saver.finish() if blocking or not saver.in_background else None

    _attempt(session, start)


def finish_save(session: Session) -> None:
    """Complete the save in progress, if any."""
    _attempt(session, session.checkpoints.saver.finish)


def advance_async_save(session: Session) -> None:
    """Advance the save in progress. Call this when no rank is still writing; otherwise it waits."""
    with session.clock.span("checkpoints"):
        _attempt(session, session.checkpoints.saver.advance)


def _progress(session: Session) -> checkpoint.Progress:
    position, tokens, states = session.data.position, session.data.tokens, session.callbacks.states()
    return checkpoint.Progress(
        step=session.step, consumed=position.consumed, sample_hash=position.sample_hash, seed=session.config.seed,
        data=tokens.fingerprint, tokenizer=tokens.manifest.tokenizer, model=asdict(session.plan.model),
        guard=states.pop(SpikeGuard.name, None), callbacks=states)


def _attempt(session: Session, action: Callable[[], checkpoint.Saved | None]) -> None:
    """Run one stage of a save, and record the checkpoint if it is complete, or the error."""
    checkpoints = session.checkpoints
    try:
        saved = action()
    except checkpoint.NotWrittenError as error:
        checkpoints.error = error
        if session.dist.is_main and session.step < session.config.steps and session.stop is None:
            session.metrics.erase_live_line()
            print_lines(f"warning: {error}\n  training continues; the next checkpoint will be attempted when it is "
                        "due", file=sys.stderr)
        return
    if saved is not None:
        checkpoints.error, checkpoints.latest_step = None, saved.step
        checkpoints.written.append(saved)
        session.early_end.saved(saved.seconds)
        session.callbacks.save(saved.folder)


def checkpoint_cost(session: Session) -> CheckpointCost:
    """Return the cost of checkpoints for run.json: number, size, median seconds to write, seconds training
    waited."""
    saves = session.checkpoints.written
    return CheckpointCost(
        written=len(saves), bytes=saves[-1].size if saves else None,
        complete_after_s=statistics.median(save.seconds for save in saves) if saves else None,
        training_waited_s=session.clock.split().get("checkpoints", 0.0))
