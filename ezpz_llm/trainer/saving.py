"""Saving of checkpoints in a run in progress, and rollback to one after too many bad steps.

All of it collective, at step boundaries.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ezpz_llm import checkpoint
from ezpz_llm.checkpoint.manifest import candidates
from ezpz_llm.launch.variables import SAVING
from ezpz_llm.rundir import RunDir, read_record, update_record
from ezpz_llm.trainer.plan import check_state
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

    def start() -> checkpoint.Saved | None:
        note = session.saver.start(session.engine, _state(session), at_once=at_once)
        if note and session.dist.is_main:
            print(f"note: checkpoints are not written in the background: {note}", flush=True)
        return session.saver.finish() if at_once or note else None

    _attempt(session, start)


def settle(session: Session) -> None:
    """Complete the save in progress, if there is one."""
    _attempt(session, session.saver.finish)


def go_on_saving(session: Session) -> None:
    """Take the save in progress, which no rank is busy with, one step further."""
    with session.clock.span("checkpoints"):
        _attempt(session, session.saver.advance)


def _state(session: Session) -> dict[str, Any]:
    position = session.position
    return {"step": session.step, "consumed": position.consumed, "sample_hash": position.sample_hash,
            "seed": session.config.seed, "data": session.data.fingerprint,
            "tokenizer": session.data.manifest.get("tokenizer"), "model": asdict(session.plan.model),
            "guard": session.spikes.state()}


def _attempt(session: Session, action: Callable[[], checkpoint.Saved | None]) -> None:
    """Take a save further, and note the checkpoint that it completed, if any, or why it could not."""
    try:
        saved = action()
    except checkpoint.NotWritten as error:
        session.unsaved = error
        if session.dist.is_main and session.step < session.config.steps and session.stopped is None:
            print(f"warning: {error}\n  training goes on, and the next checkpoint is tried in its turn",
                  file=sys.stderr, flush=True)
        return
    if saved is not None:
        session.unsaved, session.saved_step = None, saved.step
        session.saves.append(saved)
        session.early_end.saved(saved.seconds)


def checkpoint_cost(session: Session) -> dict[str, Any]:
    """What checkpoints cost the run, for run.json: seconds until one was complete, seconds that training waited."""
    saves = session.saves
    return {"written": len(saves), "bytes": saves[-1].size if saves else None,
            "complete_after_s": statistics.median(save.seconds for save in saves) if saves else None,
            "training_waited_s": session.clock.split().get("checkpoints", 0.0)}


# Rollback to the last checkpoint after too many bad steps, or the end of the run.
MOST = 3
"""Rollbacks to one checkpoint before the run stops."""


def try_rollback(session: Session) -> bool:
    """Stop after too many bad steps, or load the last checkpoint; return whether the run continues.

    All ranks have looked at the same numbers (see spike_detector.py), and so all get here after the same step.
    """
    spikes, config = session.spikes, session.config
    why = spikes.reason()
    settle(session)
    if config.on_bad_steps == "stop":
        return _stop(session, why)
    if session.rollbacks[-MOST:] == [session.saved_step] * MOST:
        return _stop(session, f"{why}; going back to step {session.saved_step} did not help {MOST} times")
    where = config.resume if session.saved_step is None else session.dist.run_dir.path
    if where is None:
        return _stop(session, f"{why}; there is no checkpoint to go back to yet")
    _roll_back(session, where, why)
    return True


def _stop(session: Session, why: str) -> bool:
    session.stopped, session.failed = why, True
    return False


def _roll_back(session: Session, where: str | Path, why: str) -> None:
    """Load the checkpoint and continue with the samples that come next: those of the bad steps are skipped.

    As Chowdhery et al. 2022 (arXiv:2204.02311, section 5.1) did it: neither the state nor the samples alone had
    brought their spikes about, and other samples from the same state made none.
    """
    def accept(folder: Path, state: dict[str, Any]) -> None:
        check_state(session.plan, folder, state, session.data.fingerprint)
        # An early end writes its state as it is; where there is an older one, that is no place to begin again.
        if (state.get("guard") or {}).get("streak") and folder != candidates(where)[-1]:
            raise checkpoint.Damaged("the checkpoint was written among bad steps", where=str(folder))

    found = checkpoint.load_newest(where, session.engine, session.dist, accept)
    reached, session.step = session.step, found.state["step"]
    session.spikes.restore(found.state.get("guard"))
    session.spikes.streak = 0
    session.engine.step_skip.limit = session.spikes.limit
    session.rollbacks.append(session.step)
    session.saved_step = session.step
    session.early_end.rolled_back()
    session.metrics.go_back(session.step)
    for profile in session.profiles:
        profile.close()
    passed_over = session.position.consumed - found.state["consumed"]
    if session.dist.is_main:
        print(f"warning: {why}\n  back from step {reached} to the checkpoint of step {session.step}; the "
              f"{passed_over} samples since then are skipped", file=sys.stderr, flush=True)
        session.dist.side.attempt("the rollback in run.json", lambda: _record_rollback(session.dist.run_dir, {
            "from_step": reached, "to_step": session.step, "samples_passed_over": passed_over, "why": why}))


def _record_rollback(run_dir: RunDir, rollback: dict[str, Any]) -> None:
    update_record(run_dir, rollbacks=[*read_record(run_dir).get("rollbacks", []), rollback])
