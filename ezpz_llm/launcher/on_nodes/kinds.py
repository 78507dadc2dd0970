"""Kinds of failures."""

from __future__ import annotations

from enum import Enum


class Kind(Enum):
    """Reason why a rank or a run ended."""

    # Root causes in a rank.
    OOM_KILLED = "killed by the kernel's out-of-memory killer"
    DEVICE_MEMORY = "the device is out of memory"
    HOST_MEMORY = "a CPU memory allocation failed"
    MISSING_MODULE = "a module or library is missing"
    DISK_FULL = "no space left to write"
    DEVICE_BROKEN = "the device is broken"
    PORT_TAKEN = "the port is already in use"
    NOT_FOUND = "the program cannot be run"
    WRONG_WORLD = "the world size is not what launch planned"
    USAGE = "a usage or configuration error"
    SIGNAL = "ended by a signal"
    EXCEPTION = "an exception"
    EXIT = "an exit code"
    # Consequences of another rank's failure or exit, or of a signal.
    ENDED_EARLY = "ended with code 0 while others were still running"
    COLLECTIVE_TIMEOUT = "timed out waiting for another rank"
    PEER_LOST = "peer lost"
    TERMINATED = "terminated from outside"
    STOPPED = "ended by launch"
    # Causes that concern the whole run.
    TIME_LIMIT = "the time limit was reached"
    NODE_FAILED = "a node failed"
    VANISHED = "gone without a record"
    UNRECORDED = "ended together with its shim"
    REQUEUED = "the job was requeued"
    PREEMPTED = "the job was preempted"
    CANCELLED = "the job was canceled"
    IDLE = "no sign of life"
    NOT_STARTED = "the launcher could not start the ranks"
    LAUNCHER = "the launcher failed"


CONSEQUENCE_KINDS = (Kind.COLLECTIVE_TIMEOUT, Kind.PEER_LOST, Kind.TERMINATED, Kind.STOPPED)
"""Kinds that follow from another rank's failure or from a signal, most informative first."""
