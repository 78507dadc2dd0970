"""What kind of failure one rank's record shows: a pure function from the record to a kind and its evidence."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from ezpz_llm.base.errors import EXIT_PREFLIGHT, EXIT_USAGE
from ezpz_llm.launch.failures.facts import Failure


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


@dataclass(frozen=True)
class Finding:
    """A kind, and the words that show it."""

    kind: Kind
    evidence: str


_BY_WORDS = tuple((kind, re.compile(pattern)) for kind, pattern in (
    (Kind.DEVICE_BROKEN,
     r"uncorrectable ECC|cudaErrorECCUncorrectable|fallen off the bus|Xid \(.*\): (?:48|63|64|74|79|94|95)\b"
     r"|cudaErrorDevicesUnavailable|hipErrorECCNotCorrectable|uncorrectable NVLink error"
     r"|Uncorrectable memory error"),
    (Kind.DEVICE_MEMORY,
     r"(?:CUDA|HIP|XPU) out of memory|OutOfMemoryError: |CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation"
     r"|CUDA error: out of memory|UR_RESULT_ERROR_OUT_OF_(?:DEVICE_)?(?:MEMORY|RESOURCES)"
     r"|MPS backend out of memory"),
    (Kind.HOST_MEMORY,
     r"^MemoryError|numpy\S*ArrayMemoryError|std::bad_alloc|Cannot allocate memory"
     r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory|Unable to allocate .* for an array"),
    (Kind.MISSING_MODULE,
     r"ModuleNotFoundError: |No module named \S+|cannot open shared object file|ImportError: cannot import name"),
    (Kind.NOT_FOUND,
     r"can't open file '[^']+': \[Errno \d+\]"),
    (Kind.DISK_FULL,
     r"No space left on device|Disk quota exceeded|\[enforce fail at inline_container"),
    (Kind.PORT_TAKEN,
     r"EADDRINUSE|[Aa]ddress already in use"),
    (Kind.COLLECTIVE_TIMEOUT,
     r"Watchdog caught collective operation timeout|[Cc]ollective timeout|ran for \d+ milliseconds before timing"
     r" out|Some NCCL operations have failed or timed out|Timed out waiting \d+ms for (?:recv|send|\w+) operation"
     r"|Application timeout caused pair closure|[Ww]ait timeout after \d+ms, keys|Socket Timeout"
     r"|Timed out after \d+ seconds waiting for clients|HeartbeatMonitor::runLoop\(\)|Monitored barrier"
     r"|barrier timed out|port issue: \{ status: failed, details: training timeout"),
    (Kind.PEER_LOST,
     r"(?i)"
     # gloo
     r"Connection closed by (?:remote )?peer|gloo.*(?:Connection reset by peer|Broken pipe|Connection refused)"
     r"|connectFullMesh failed"
     # NCCL, RCCL
     r"|ncclRemoteError|remote process exited|NCCL communicator was aborted|[Cc]onnection closed by remote peer"
     r"|Call to (?:recv|send|connect).* failed ?: (?:Connection reset|Connection refused|Broken pipe)"
     r"|socket\w*(?:Connect|Progress)\S*:? .*(?:Connection re(?:fused|set)|closed)"
     # torch's store
     r"|Connection was likely closed|(?:recv|send)(?:Value|Bytes)\S* failed on SocketImpl"
     r"|failed to recv, got 0 bytes|[Cc]lient socket has (?:failed to connect|timed out)"
     # oneCCL, libfabric, UCX
     r"|OFI poll failed|fi_cq_read(?:err)?\b.*(?:err|fail)|atl_status: FAILURE|Transport endpoint is not connected"
     r"|UCX +(?:ERROR|WARN) .*(?:reset by remote peer|Connection reset|Endpoint timeout|not connected)"
     r"|transport retry (?:count|counter) exceeded"
     # MPI
     r"|communication error with rank \d+|MPIX?_ERR_PROC_FAILED|readv failed: Connection"
     r"|MPIDU_?\w*[Ss]ock\w*.*(?:closed|reset|failed)|lost communication with a remote daemon"),
))
"""Words of a rank that say what kind of failure it is; the first kind that fits counts."""
_KILLED_CODE = 137
_KILLED_CHILD = re.compile(r"killed by signal: Killed|exit code: -9|Killed$")


def classify(failure: Failure) -> Finding:
    """Tell why this rank ended, from its record alone."""
    raised = failure.exception
    said = [raised.line, *raised.message.split("\n")[1:], raised.caused_by or ""] if raised else list(failure.tail)
    if failure.oom_killed and (failure.exit_code == _KILLED_CODE or _first(_KILLED_CHILD, [*said, *failure.tail])):
        return Finding(Kind.OOM_KILLED, failure.oom_killed)
    if failure.ended_by is not None:
        return Finding(Kind.STOPPED if failure.ended_by == "launch" else Kind.TERMINATED, failure.ended_by)
    if failure.signal == "SIGABRT":
        # What calls abort() says why in a line of its own, if at all.
        said += failure.tail
    # A rank that the kernel or another process kills says nothing: its last words are about something else.
    if failure.signal in (None, "SIGABRT"):
        for kind, pattern in _BY_WORDS:
            if line := _first(pattern, said):
                return Finding(kind, line)
    if failure.signal is not None:
        return Finding(Kind.SIGNAL, raised.line if raised else failure.signal)
    return _by_code(failure) if raised is None else Finding(Kind.EXCEPTION, raised.line)


def _by_code(failure: Failure) -> Finding:
    last = failure.tail[-1] if failure.tail else ""
    error = next((line for line in reversed(failure.tail) if line.startswith("error: ")), None)
    if failure.exit_code in (126, 127):
        return Finding(Kind.NOT_FOUND, last)
    if failure.exit_code == EXIT_PREFLIGHT and error:
        return Finding(Kind.WRONG_WORLD, error)
    if failure.exit_code == EXIT_USAGE and error:
        return Finding(Kind.USAGE, error)
    return Finding(Kind.EXIT, error or last)


def _first(pattern: re.Pattern[str], lines: list[str]) -> str | None:
    return next((line.strip() for line in lines if pattern.search(line)), None)


def what_was_lost(evidence: str) -> str:
    """A peer's loss in two or three words, the same for all ranks that saw it alike."""
    words = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe",
             "remote process exited", "communicator was aborted", "timed out", "connection was likely closed")
    lower = evidence.lower()
    return next((word for word in words if word in lower), "connection lost")
