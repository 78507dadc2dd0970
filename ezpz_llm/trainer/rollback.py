"""Rollback to the last checkpoint after too many bad steps, or the end of the run. Collective."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ezpz_llm import checkpoint
from ezpz_llm.checkpoint.retention import candidates
from ezpz_llm.rundir import RunDir, read_record, update_record
from ezpz_llm.trainer.plan import check_state
from ezpz_llm.trainer.saving import settle
from ezpz_llm.trainer.session import Session

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
        # An early end writes its state as it is; with an older one at hand, that is no place to begin again.
        if (state.get("guard") or {}).get("streak") and folder != candidates(where)[-1]:
            raise checkpoint.Damaged("the checkpoint was written among bad steps", where=str(folder))

    found = checkpoint.load_newest(where, session.engine, session.dist, accept)
    reached, session.step = session.step, found.state["step"]
    session.spikes.restore(found.state.get("guard"))
    session.spikes.streak = 0
    session.engine.gate.limit = session.spikes.limit
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
