"""Kinds of messages of schedulers and launchers about a run's end."""

from __future__ import annotations

TIME_LIMIT, NODE_FAILED, REQUEUED, PREEMPTED, CANCELLED = (
    "time limit", "node failed", "requeued", "preempted", "cancelled")
"""Messages that end a whole job."""

STEP_CANCELLED, STEP_ENDED = "step cancelled", "step ended"
"""A user, launch, or the step's launcher canceled the step. The launcher does so after a failed rank, and prints
the second message."""

MEMORY, ENDED, ABORTED, NOT_STARTED, WRONG_WORLD = "memory", "ended", "aborted", "not started", "wrong world"
SSH = "ssh"
"""Source of messages, not a kind: a failed ssh connection needs its own advice."""
