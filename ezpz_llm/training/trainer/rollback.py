"""Rollback to the last checkpoint after too many bad steps."""

from __future__ import annotations

import sys
from pathlib import Path

from ezpz_llm.core.base import print_lines
from ezpz_llm.core.rundir.records import Rollback, read_record, update_record
from ezpz_llm.training import checkpoint
from ezpz_llm.training.checkpoint.retention import candidates
from ezpz_llm.training.checkpoint.state import State
from ezpz_llm.training.trainer.checkpoint_identity import check_identity
from ezpz_llm.training.trainer.checkpoint_saves import finish_save
from ezpz_llm.training.trainer.session import Session, Stop

_MAX_ROLLBACKS = 3
"""Maximum number of rollbacks to the same checkpoint."""


def try_rollback(session: Session) -> bool:
    """Handle too many bad steps: load the last checkpoint or stop; return True if the run continues. Collective.

    All ranks observe the same numbers (see spike_detector.py), so they all get here after the same step.
    """
    config, reason = session.config, session.spikes.reason()
    finish_save(session)
    latest = session.checkpoints.latest_step
    if config.on_bad_steps == "stop":
        return _stop(session, reason)
    if session.rollbacks[-_MAX_ROLLBACKS:] == [latest] * _MAX_ROLLBACKS:
        return _stop(session, f"{reason}; rolling back to step {latest} did not help {_MAX_ROLLBACKS} times")
    source = config.resume if latest is None else session.dist.run_dir.path
    if source is None:
        return _stop(session, f"{reason}; there is no checkpoint to roll back to yet")
    _roll_back(session, source, reason)
    return True


def _stop(session: Session, reason: str) -> bool:
    session.stop = Stop(reason, failed=True)
    return False


def _roll_back(session: Session, source: str | Path, reason: str) -> None:
    """Load the checkpoint and continue with new samples, skipping those consumed since then.

    This follows Chowdhery et al. 2022 (arXiv:2204.02311, section 5.1): their spikes occurred only for a particular
    combination of model state and samples, and did not recur with other samples from the same state.
    """
    def accept(folder: Path, state: State, *_: object) -> None:
        """Reject a checkpoint that does not fit, or that was written during bad steps if there is an older one."""
        check_identity(session.config, session.plan.model, folder, state, session.data.tokens)
        # Only an early end saves during bad steps.
        if (state.guard or {}).get("streak") and folder != candidates(source)[-1]:
            raise checkpoint.DamagedCheckpointError("the checkpoint was written during bad steps",
                                                    where=str(folder))

    loaded = checkpoint.load_newest(source, session.engine, session.dist, accept)
    reached, session.step = session.step, loaded.state.step
    session.callbacks.restore(loaded.state.callback_states)
    session.spikes.streak = 0
    session.rollbacks.append(session.step)
    session.checkpoints.latest_step = session.step
    session.early_end.rolled_back()
    session.metrics.rewind(session.step)
    skipped = session.data.position.consumed - (loaded.state.consumed or 0)
    if session.dist.is_main:
        print_lines(f"warning: {reason}\n  rolled back from step {reached} to the checkpoint of step "
                    f"{session.step}; the {skipped} samples since then are skipped", file=sys.stderr)
        run_dir = session.dist.run_dir
        rollback = Rollback(from_step=reached, to_step=session.step, samples_passed_over=skipped, why=reason)
        session.dist.side.attempt("the rollback in run.json", lambda: update_record(
            run_dir, rollbacks=[*read_record(run_dir).rollbacks, rollback]))
