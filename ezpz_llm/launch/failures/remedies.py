"""What helps against errors that are known by their words: from one rank's record to a line of advice."""

from __future__ import annotations

import re

from ezpz_llm.launch.failures.record import Failure

_BY_WORDS = tuple((re.compile(pattern), advice) for pattern, advice in (
    (r"device-side assert triggered",
     "an index outside its table, as a rule: a token id >= the vocabulary, a label >= the classes;"
     " CUDA_LAUNCH_BLOCKING=1 launch … names the line"),
    (r"an illegal memory access was encountered",
     "CUDA_LAUNCH_BLOCKING=1 launch … names the line; on one host only: leave that host out"),
    (r"Error: network .+ not found|Failed to initialize any NET plugin",
     "NCCL_NET names a plug-in that NCCL does not find: unset NCCL_NET, or add the folder of its libnccl-net.so to"
     " LD_LIBRARY_PATH (and those of the libraries that ldd says it needs)"),
    (r"DataLoader worker .* killed by signal: Bus error|insufficient shared memory",
     "/dev/shm of that host is full (df /dev/shm): fewer DataLoader workers, or a larger one (in a container:"
     " --shm-size, --ipc=host)"),
    (r"Too many open files|Errno 24\b",
     "ulimit -n 65536 before launch (in the job script), or fewer DataLoader workers"),
    (r"can't start new thread|pthread_create failed|fork: retry|BlockingIOError: .*Resource temporarily",
     "fewer threads and processes a host: OMP_NUM_THREADS, DataLoader workers, --ppn; ulimit -u and the cgroup's"
     " pids.max count all ranks of a host together"),
    (r"Stale (?:NFS )?file handle|Errno 116\b",
     "the file was replaced, or its file system mounted anew, while it was open: start again; if it comes back on"
     " one host, leave that host out"),
))
_BY_SIGNAL = {
    "SIGBUS": "a file that is mapped into memory was truncated or rewritten, or the file system it lies on is full:"
              " df /dev/shm, and who writes to that file?",
    "SIGSEGV": "ulimit -c unlimited before launch leaves a core file: gdb python3 CORE names the library; the"
               " Python line above called into it",
    "SIGILL": "a library was built for another processor than this host's: install it on such a host",
}


def remedy(failure: Failure) -> str | None:
    """The next thing to do; None where these words are not known."""
    raised = failure.exception
    # A traceback quotes source lines, which may hold any words.
    said = [raised.line, *raised.message.split("\n"), raised.caused_by or ""] if raised else failure.tail
    for pattern, advice in _BY_WORDS:
        if any(pattern.search(line) for line in said):
            return advice
    return _BY_SIGNAL.get(failure.signal or "")
