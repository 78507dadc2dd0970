"""Kinds of messages of schedulers and launchers about a run's end."""

from __future__ import annotations

TIME_LIMIT, NODE_FAILED, REQUEUED, PREEMPTED, CANCELLED = (
    "time limit", "node failed", "requeued", "preempted", "cancelled")
"""Messages that end a whole job."""

STEP_CANCELLED = "step cancelled"
"""Printed after scancel, and also when launch or srun ends the step of a failed rank."""

MEMORY, ENDED, ABORTED, NOT_STARTED, WRONG_WORLD = "memory", "ended", "aborted", "not started", "wrong world"
SSH = "ssh"
"""Source of messages, not a kind: a failed ssh connection needs its own advice."""
