"""Kinds of messages of schedulers and launchers about a run's end."""

from __future__ import annotations

TIME_LIMIT, NODE_FAILED, REQUEUED, PREEMPTED, CANCELLED = (
    "time limit", "node failed", "requeued", "preempted", "cancelled")
"""What ends a whole job."""

STEP_CANCELLED = "step cancelled"
"""Of an order, or of launch and srun themselves where a rank has failed."""

MEMORY, ENDED, ABORTED, NOT_STARTED, WRONG_WORLD = "memory", "ended", "aborted", "not started", "wrong world"
SSH = "ssh"
"""A program, not a kind: where a connection was refused, what helps is another thing."""
