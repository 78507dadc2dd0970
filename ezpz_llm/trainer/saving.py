"""Saving of checkpoints in a run in progress, and of their cost and failures.

All of it collective, at step boundaries.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from ezpz_llm import checkpoint
from ezpz_llm.launch.variables import SAVING
from ezpz_llm.trainer.session import Session


def save(session: Session, *, at_once: bool = False) -> None:
    """Begin to write the checkpoint of this step; with `at_once` it is complete on return.

    One that cannot be written costs a warning, and the next one is tried in its turn: training goes on, and nothing
    is lost but the chance to go back to this step. At the end of a run there is no next one (`finish` says so).
    """
    session.heartbeat.beat(SAVING, session.step)
    settle(session)
    if session.saved_step == session.step:
        return
    session.position = session.position.agree(session.dist)
    with _warned(session):
        note = session.saver.start(session.engine, _state(session), at_once=at_once)
        if note and session.dist.is_main:
            print(f"note: checkpoints are not written in the background: {note}", flush=True)
        if at_once or note:
            _note(session, session.saver.finish())


def settle(session: Session) -> None:
    """Complete the save in progress, if there is one."""
    with _warned(session):
        _note(session, session.saver.finish())


def go_on_saving(session: Session) -> None:
    """Take the save in progress, which no rank is busy with, one step further."""
    with session.clock.span("checkpoints"), _warned(session):
        _note(session, session.saver.advance())


def _state(session: Session) -> dict[str, Any]:
    position = session.position
    return {"step": session.step, "consumed": position.consumed, "sample_hash": position.sample_hash,
            "seed": session.config.seed, "data": session.data.fingerprint,
            "tokenizer": session.data.manifest.get("tokenizer"), "model": asdict(session.plan.model),
            "guard": session.spikes.state()}


def _note(session: Session, saved: checkpoint.Saved | None) -> None:
    if saved is None:
        return
    session.unsaved, session.saved_step = None, saved.step
    session.saves.append(saved)
    session.early_end.saved(saved.seconds)


def account(session: Session) -> dict[str, Any]:
    """What checkpoints cost the run, for run.json: seconds until one was complete, seconds that training waited."""
    saves = session.saves
    return {"written": len(saves), "bytes": saves[-1].size if saves else None,
            "complete_after_s": statistics.median(save.seconds for save in saves) if saves else None,
            "training_waited_s": session.clock.split().get("checkpoints", 0.0)}


@contextmanager
def _warned(session: Session) -> Iterator[None]:
    try:
        yield
    except checkpoint.NotWritten as error:
        session.unsaved = error
        if session.dist.is_main and session.step < session.config.steps and session.stopped is None:
            print(f"warning: {error}\n  training goes on, and the next checkpoint is tried in its turn",
                  file=sys.stderr, flush=True)
