"""Kinds of failures."""

from __future__ import annotations

from enum import Enum


class Kind(Enum):
    """Why a rank, or a run, ended."""

    # What a rank does of itself.
    OOM_KILLED = "killed by the kernel's out-of-memory killer"
    DEVICE_MEMORY = "the device is out of memory"
    HOST_MEMORY = "an allocation of host memory failed"
    MISSING_MODULE = "a module or library is missing"
    DISK_FULL = "no space left to write"
    DEVICE_BROKEN = "the device is broken"
    PORT_TAKEN = "the port is taken"
    NOT_FOUND = "the program cannot be run"
    WRONG_WORLD = "another world than launch promised"
    USAGE = "a usage or configuration error"
    SIGNAL = "ended by a signal"
    EXCEPTION = "an exception"
    EXIT = "an exit code"
    # What a rank suffers from others.
    ENDED_EARLY = "ended with code 0 while others were still running"
    COLLECTIVE_TIMEOUT = "waited in vain for another rank"
    PEER_LOST = "peer lost"
    TERMINATED = "ended from outside"
    STOPPED = "ended by launch"
    # What becomes of a run.
    TIME_LIMIT = "the time limit"
    NODE_FAILED = "a node failed"
    VANISHED = "gone without a record"
    UNRECORDED = "ended together with its shim"
    REQUEUED = "the job was requeued"
    PREEMPTED = "the job was preempted"
    CANCELLED = "the job was cancelled"
    IDLE = "no sign of life"
    NOT_STARTED = "the launcher could not start the ranks"
    LAUNCHER = "the launcher failed"


FOLLOWERS = (Kind.COLLECTIVE_TIMEOUT, Kind.PEER_LOST, Kind.TERMINATED, Kind.STOPPED)
"""Kinds that another rank or somebody else brought about, those that tell most of the cause first."""
