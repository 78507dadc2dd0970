"""Advice after a failure: one line for its kind, or for an error that is known by its words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from ezpz_llm.launch.failures.facts import Failure, RunFacts
from ezpz_llm.launch.failures.judge import Evidence, Verdict
from ezpz_llm.launch.failures.kinds import Kind
from ezpz_llm.launch.failures.log_patterns import SSH, read_matches
from ezpz_llm.launch.hostlist import rank_ranges
from ezpz_llm.launch.option_parsing import without
from ezpz_llm.rundir.files import RunDir

_HOSTS_NAMED = 8
_NO_RANK = re.compile(r"environment variable (?:RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set")
_OUT_OF_MEMORY = "a smaller micro batch (--micro-batch-size), --ds-config zero3, or one that offloads"


def advice(verdict: Verdict, evidence: Evidence, run_dir: RunDir, typed: Sequence[str]) -> str | None:
    """The next thing to type or change; None where the error itself says it best."""
    if verdict.kind in (Kind.TIME_LIMIT, Kind.PREEMPTED, Kind.REQUEUED, Kind.CANCELLED):
        return resume(run_dir, typed) or "more time; there is no checkpoint to go on from"
    if verdict.kind in (Kind.NODE_FAILED, Kind.VANISHED) and verdict.hosts:
        return _without(verdict.hosts, evidence.facts, run_dir, typed)
    if verdict.kind is Kind.DEVICE_BROKEN:
        return f"tell the site; {_without(verdict.hosts, evidence.facts, run_dir, typed)}"
    if verdict.kind is Kind.IDLE and any(run_dir.rank_stacks(0).parent.glob("rank*.txt")):
        return f"read what the ranks were doing: {run_dir.rank_stacks(0).parent}"
    if verdict.kind in (Kind.IDLE, Kind.COLLECTIVE_TIMEOUT):
        return (f"ezpz-llm why {run_dir.path} while it hangs names the silent rank and its stack;"
                " --idle-timeout S ends a hang sooner")
    if verdict.kind is Kind.NOT_STARTED:
        return _to_start(verdict, run_dir)
    if _NO_RANK.search(verdict.evidence):
        return ("launch sets RANK and its like, and something between it and the program clears them (a container's"
                " --cleanenv, env -i) or starts other ranks (an srun in the script): let launch start the program")
    if verdict.kind in (Kind.MISSING_MODULE, Kind.NOT_FOUND):
        return _missing(verdict, evidence)
    if verdict.kind is Kind.DISK_FULL:
        return _room(verdict.evidence, run_dir)
    if verdict.kind in (Kind.EXCEPTION, Kind.SIGNAL, Kind.EXIT):
        cause = next((failure for failure in evidence.failures if failure.rank == verdict.rank), None)
        return remedy(cause) if cause else None
    return _ADVICE.get(verdict.kind)


_LIBRARY = re.compile(r"(\S+\.so[.\d]*): cannot open shared object file")
_PATH = re.compile(r"'(/[^']+)'|\"(/[^\"]+)\"|(?:^|\s)(/[^\s:,]+)")


def _missing(verdict: Verdict, evidence: Evidence) -> str:
    """What the ranks that have it tell of those that lack it."""
    library = _LIBRARY.search(verdict.evidence)
    text = "install it into the Python that the ranks run (launch --explain shows which)"
    if library:
        text = (f"load the module that brings {library[1]}, or add its folder to LD_LIBRARY_PATH, where the ranks"
                " run; ldd on the library that asks for it shows what else is missing")
    if verdict.kind is Kind.NOT_FOUND:
        text = "see its path and name: the ranks start in the folder in which launch was typed"
    facts = evidence.facts
    lack = [rank for rank, one in evidence.found.items() if one.kind is verdict.kind]
    have = [rank for rank in range(facts.world_size) if rank not in lack]
    if not have:
        return text
    bad, good = ({facts.hosts[rank] for rank in ranks if rank < len(facts.hosts)} for ranks in (lack, have))
    if bad.isdisjoint(good):
        return (f"{rank_ranges(have)} on {_some(good)} did not miss it: compare PATH, the environment and the"
                f" mounts of {_some(bad)} with theirs; if it is missing there: {text}")
    return (f"{rank_ranges(have)} did not miss it: what differs in {rank_ranges(lack)} (PATH, PYTHONPATH, folder)?"
            f" Else {text}")


def _some(hosts: Collection[str]) -> str:
    return ", ".join(sorted(hosts)[:_HOSTS_NAMED]) + (" …" if len(hosts) > _HOSTS_NAMED else "")


def _room(error: str, run_dir: RunDir) -> str:
    """By the path that the error names."""
    match = _PATH.search(error)
    if match is None:
        return "make room, or name another place (--run-dir, EZPZ_LLM_CACHE)"
    path = next(filter(None, match.groups()))
    what = "your quota there" if "quota" in error.lower() else f"df {path}"
    if Path(path).is_relative_to(run_dir.path):
        return f"make room where {path} lies ({what}), or name another --run-dir"
    return f"make room where {path} lies ({what}), or write it elsewhere (caches: EZPZ_LLM_CACHE, HF_HOME, TMPDIR)"


_ADVICE = {
    Kind.ENDED_EARLY: "every rank must enter every collective: less data there, an early return, a sys.exit?",
    Kind.OOM_KILLED: f"more memory a rank (fewer ranks a host: --ppn), {_OUT_OF_MEMORY}",
    Kind.HOST_MEMORY: f"more memory a rank (fewer ranks a host: --ppn), {_OUT_OF_MEMORY}",
    Kind.DEVICE_MEMORY: _OUT_OF_MEMORY,
    Kind.PORT_TAKEN: "launch again without MASTER_PORT in the environment: launch finds a free one",
    Kind.WRONG_WORLD: "the mpiexec (or srun --mpi plug-in) that belongs to this MPI; ezpz-llm doctor",
    Kind.UNRECORDED: "look into the kernel's log of that host (dmesg): what killed a rank and its shim at once?",
    Kind.PEER_LOST: "ezpz-llm doctor, or launch --preflight: no rank says that it failed, so look at the network",
}


def _to_start(verdict: Verdict, run_dir: RunDir) -> str:
    where = ", ".join(verdict.hosts) or "the hosts"
    if any(found.source == SSH for found in read_matches(verdict.evidence)):
        return (f"`ssh {verdict.hosts[0] if verdict.hosts else 'HOST'} true` from here must work without a"
                " question: your key in ~/.ssh/authorized_keys, the host's in ~/.ssh/known_hosts. In a PBS job,"
                " HYDRA_LAUNCHER=rsh HYDRA_LAUNCHER_EXEC=pbs_tmrsh in the environment starts ranks without ssh")
    return (f"see that {where} can read the Python and the environment of this launch, and {run_dir.path}, under"
            " the same paths; --hosts leaves a host out, --start-timeout S waits longer")


def resume(run_dir: RunDir, typed: Sequence[str]) -> str | None:
    """The command that goes on from the run's last checkpoint; None where there is none."""
    if not (run_dir.checkpoints / "latest").exists() or not typed:
        return None
    return f"{shlex.join(without(typed, '--resume'))} --resume {shlex.quote(str(run_dir.path))}"


def _without(hosts: Sequence[str], facts: RunFacts, run_dir: RunDir, typed: Sequence[str]) -> str:
    left = [host for host in dict.fromkeys(facts.hosts) if host not in hosts]
    bad = ", ".join(hosts)
    if not left:
        return f"another host than {bad}"
    command = resume(run_dir, typed) or shlex.join(typed)
    again = command.replace("launch ", f"launch --hosts {','.join(left)} ", 1) if len(left) <= 16 else command
    return f"leave {bad} out: {again}"


# What helps against errors that are known by their words: from one rank's record to a line of advice.
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
