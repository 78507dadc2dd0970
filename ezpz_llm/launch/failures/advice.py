"""Advice after a failure: one line, by the text that told the cause (texts.toml), or for its kind."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from ezpz_llm.launch.failures.facts import RunFacts
from ezpz_llm.launch.failures.judge import Evidence, Verdict, ranks_alike
from ezpz_llm.launch.failures.kinds import Kind
from ezpz_llm.launch.failures.log_kinds import SSH
from ezpz_llm.launch.failures.log_patterns import read_matches
from ezpz_llm.launch.failures.texts import filled_in
from ezpz_llm.launch.hostlist import rank_ranges
from ezpz_llm.launch.hostnames import NodeNames
from ezpz_llm.launch.option_parsing import without
from ezpz_llm.rundir import RunDir

_HOSTS_NAMED = 8
_PATH = re.compile(r"'(/[^']+)'|\"(/[^\"]+)\"|(?:^|\s)(/[^\s:,]+)")


def advice(verdict: Verdict, evidence: Evidence, run_dir: RunDir, typed: Sequence[str] | None) -> str | None:
    """The next thing to type or change; None where the error itself says it best.

    Args:
        typed: the command line of the run; None where another user may have written what is recorded of it.
    """
    if verdict.kind in (Kind.TIME_LIMIT, Kind.PREEMPTED, Kind.REQUEUED, Kind.CANCELLED):
        more = "more time; there is no checkpoint to go on from" if verdict.kind is Kind.TIME_LIMIT else None
        return resume(run_dir, typed) or more
    if verdict.kind in (Kind.NODE_FAILED, Kind.VANISHED) and verdict.hosts:
        return _without(verdict.hosts, evidence.facts, run_dir, typed)
    if verdict.kind is Kind.IDLE and not verdict.advice and any(run_dir.rank_stacks(0).parent.glob("rank*.txt")):
        return f"read what the ranks were doing: {run_dir.rank_stacks(0).parent}"
    if verdict.kind is Kind.IDLE and not verdict.advice:
        return (f"ezpz-llm why {run_dir.path} while it hangs names the silent rank and its stack;"
                " --idle-timeout S ends a hang sooner")
    if verdict.kind is Kind.NOT_STARTED:
        return _to_start(verdict, run_dir)
    told = verdict.advice or _ADVICE.get(verdict.kind)
    if told is None:
        return None
    told = _of_the_run(told, verdict, evidence, run_dir, typed)
    return _compared(verdict, evidence, told) if verdict.kind in (Kind.MISSING_MODULE, Kind.NOT_FOUND) else told


def _compared(verdict: Verdict, evidence: Evidence, text: str) -> str:
    """What the ranks that have it tell of those that lack it."""
    facts = evidence.facts
    lack, have = ranks_alike(verdict.kind, verdict.cause, evidence)
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


def _of_the_run(advice: str, verdict: Verdict, evidence: Evidence, run_dir: RunDir,
                typed: Sequence[str] | None) -> str:
    """An advice with what the run and the words of the error have for its {NAME}s."""
    match = _PATH.search(verdict.evidence)
    path = next(filter(None, match.groups())) if match else None
    elsewhere = "write it elsewhere (caches: EZPZ_LLM_CACHE, HF_HOME, TMPDIR)"
    if path is None:
        elsewhere = "name another place (--run-dir, EZPZ_LLM_CACHE)"
    elif Path(path).is_relative_to(run_dir.path):
        elsewhere = "name another --run-dir"
    return filled_in(advice, {
        "run_dir": str(run_dir.path), "hosts": _some(verdict.hosts) or "its host", "path": path or "that file",
        "elsewhere": elsewhere, "leave_out": _without(verdict.hosts, evidence.facts, run_dir, typed)})


_ADVICE = {
    Kind.ENDED_EARLY: "every rank must enter every collective: the same number of batches on all (drop_last, or"
                      " torch's Join), no early return, no sys.exit",
    Kind.OOM_KILLED: "more memory a rank (fewer ranks a host: --ppn), a smaller micro batch (--micro-batch-size),"
                     " --ds-config zero3, or one that offloads",
    Kind.NOT_FOUND: "see its path and name: the ranks start in the folder in which launch was typed",
    Kind.WRONG_WORLD: "the mpiexec (or srun --mpi plug-in) that belongs to this MPI; ezpz-llm doctor",
    Kind.UNRECORDED: "look into the kernel's log of that host (dmesg): what killed a rank and its shim at once?",
}


def _to_start(verdict: Verdict, run_dir: RunDir) -> str:
    where = ", ".join(verdict.hosts) or "the hosts"
    if any(found.source == SSH for found in read_matches(verdict.evidence)):
        return (f"`ssh {shlex.quote(verdict.hosts[0]) if verdict.hosts else 'HOST'} true` from here"
                " must work without a question: your key in ~/.ssh/authorized_keys, the host's in"
                " ~/.ssh/known_hosts. In a PBS job, HYDRA_LAUNCHER=rsh HYDRA_LAUNCHER_EXEC=pbs_tmrsh in the"
                " environment starts ranks without ssh")
    return (f"see that {where} can read the Python and the environment of this launch, and {run_dir.path}, under"
            " the same paths; --hosts leaves a host out, --start-timeout S waits longer")


def resume(run_dir: RunDir, typed: Sequence[str] | None) -> str | None:
    """The command that continues from the run's last checkpoint; None where there is no checkpoint. Of another
    user's run (`typed` is None) no command is quoted, as that could have anything typed."""
    if not (run_dir.checkpoints / "latest").exists():
        return None
    if typed is None:
        return f"your own command that trains this model, with --resume {shlex.quote(str(run_dir.path))}"
    if not typed:
        return None
    return f"{shlex.join(without(typed, '--resume'))} --resume {shlex.quote(str(run_dir.path))}"


def _without(hosts: Sequence[str], facts: RunFacts, run_dir: RunDir, typed: Sequence[str] | None) -> str:
    named = NodeNames(hosts)
    left = [host for host in dict.fromkeys(facts.hosts) if host not in named]
    bad = ", ".join(hosts)
    if not left:
        return f"another host than {bad}"
    if typed is None:
        return f"leave {bad} out: launch --hosts …, with your own command"
    typed = without(typed, "--hosts")
    command = resume(run_dir, typed) or shlex.join(typed)
    again = command.replace("launch ", f"launch --hosts {','.join(left)} ", 1) if len(left) <= 16 else command
    return f"leave {bad} out: {again}"
