"""What to try next, one line a kind of failure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ezpz_llm.launch.failures.facts import RunFacts
from ezpz_llm.launch.failures.judge import Verdict
from ezpz_llm.launch.failures.kinds import Kind
from ezpz_llm.rundir.layout import RunDir

_OUT_OF_MEMORY = "a smaller micro batch (--micro-batch), --ds-config zero3, or one that offloads"


def advice(verdict: Verdict, run_dir: RunDir, facts: RunFacts, typed: Sequence[str]) -> str | None:
    """The next thing to type or change; None where the error itself says it best."""
    if verdict.kind in (Kind.TIME_LIMIT, Kind.PREEMPTED, Kind.REQUEUED, Kind.CANCELLED):
        return resume(run_dir, typed) or "more time; there is no checkpoint to go on from"
    if verdict.kind in (Kind.NODE_FAILED, Kind.VANISHED) and verdict.hosts:
        return _without(verdict.hosts, facts, run_dir, typed)
    if verdict.kind is Kind.IDLE and any(run_dir.rank_stacks(0).parent.glob("rank*.txt")):
        return f"read what the ranks were doing: {run_dir.rank_stacks(0).parent}"
    if verdict.kind in (Kind.IDLE, Kind.COLLECTIVE_TIMEOUT):
        return (f"ezpz-llm why {run_dir.path} while it hangs names the silent rank and its stack;"
                " --timeout-idle S ends a hang sooner")
    if verdict.kind is Kind.MISSING_MODULE:
        return "install it into the Python that the ranks run (launch --explain shows which)"
    return _ADVICE.get(verdict.kind)


_ADVICE = {
    Kind.OOM_KILLED: f"more memory a rank (fewer ranks a host: --ppn), {_OUT_OF_MEMORY}",
    Kind.HOST_MEMORY: f"more memory a rank (fewer ranks a host: --ppn), {_OUT_OF_MEMORY}",
    Kind.DEVICE_MEMORY: _OUT_OF_MEMORY,
    Kind.DISK_FULL: "make room, or name another place (--run-dir, EZPZ_LLM_CACHE)",
    Kind.PORT_TAKEN: "launch again without MASTER_PORT in the environment: launch finds a free one",
    Kind.WRONG_WORLD: "the mpiexec (or srun --mpi plug-in) that belongs to this MPI; ezpz-llm doctor",
    Kind.UNRECORDED: "look into the kernel's log of that host (dmesg): what killed a rank and its shim at once?",
    Kind.PEER_LOST: "ezpz-llm doctor, or launch --preflight: no rank says that it failed, so look at the network",
}


def resume(run_dir: RunDir, typed: Sequence[str]) -> str | None:
    """The command that goes on from the run's last checkpoint; None where there is none."""
    if not (run_dir.checkpoints / "latest").exists() or not typed:
        return None
    words = _without_option(typed, "--resume")
    return f"{shlex.join(words)} --resume {shlex.quote(str(run_dir.path))}"


def _without(hosts: Sequence[str], facts: RunFacts, run_dir: RunDir, typed: Sequence[str]) -> str:
    left = [host for host in dict.fromkeys(facts.hosts) if host not in hosts]
    bad = ", ".join(hosts)
    if not left:
        return f"another host than {bad}"
    command = resume(run_dir, typed) or shlex.join(typed)
    again = command.replace("launch ", f"launch --hosts {','.join(left)} ", 1) if len(left) <= 16 else command
    return f"leave {bad} out: {again}"


def _without_option(typed: Sequence[str], option: str) -> list[str]:
    words, skip = [], False
    for word in typed:
        if skip:
            skip = False
        elif word == option:
            skip = True
        elif not word.startswith(f"{option}="):
            words.append(word)
    return words
