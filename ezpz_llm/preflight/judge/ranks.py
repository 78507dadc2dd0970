"""Are all ranks there, each once, and do the environment and MPI count them alike?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ezpz_llm.preflight.judge import folding
from ezpz_llm.preflight.judge.gathered import MPI, READY, Finding, Gathered, collected, stage_name

LOST, STUCK = "lost_in", "stuck_in"
"""Members of a rank's facts: the stage in which its connection ended, or which it did not answer."""

_HOSTS_APART = 4
"""Up to so many hosts whose ranks are missing are named each by itself."""


def judge(gathered: Gathered) -> Iterator[Finding]:
    """Findings on the numbering of ranks and on those that are missing or went away."""
    yield from _duplicates(gathered)
    yield from _sizes(gathered)
    yield from _missing(gathered)
    yield from _gone(gathered)
    yield from _mpi(gathered)
    for note, numbers in collected([(note, facts["rank"]) for facts in gathered.told
                                   for note in facts.get("rank_notes", ())]).items():
        yield Finding("warn", "ranks", f"{folding.ranks(numbers)}: {note}",
                      "launch from a shell without left-over rank variables")


def _duplicates(gathered: Gathered) -> Iterator[Finding]:
    counts = Counter(facts["rank"] for facts in gathered.facts)
    for rank in sorted(rank for rank, count in counts.items() if count > 1):
        places = [f"{facts['host']} (pid {facts.get('pid', '?')}, {facts.get('rank_source', 'source unknown')})"
                  for facts in gathered.facts if facts["rank"] == rank]
        yield Finding("bad", "ranks", f"{len(places)} processes say that they are rank {rank}: {', '.join(places)}",
                      "start ranks with launch alone, and unset rank variables (RANK, PMI_RANK, …) that a shell "
                      "exports")


def _sizes(gathered: Gathered) -> Iterator[Finding]:
    wrong = [facts for facts in gathered.told if facts["world_size"] != gathered.world_size]
    for size, numbers in collected([(facts["world_size"], facts["rank"]) for facts in wrong]).items():
        yield Finding("bad", "ranks", f"{folding.ranks(numbers)} in a world of {size}, rank 0 in one of "
                                      f"{gathered.world_size}", "one launcher for all hosts: launch")


def _missing(gathered: Gathered) -> Iterator[Finding]:
    there = {facts["rank"] for facts in gathered.facts}
    missing = [rank for rank in range(gathered.world_size) if rank not in there]
    unreached = {facts["host"].partition(".")[0] for facts in gathered.unreached}
    by_host: dict[str, list[int]] = {}
    for rank in missing:
        host = gathered.hosts[rank] if rank < len(gathered.hosts) else ""
        if host.partition(".")[0] not in unreached:
            by_host.setdefault(host, []).append(rank)
    if not gathered.hosts and sum(one["ranks_there"] for one in gathered.unreached) >= len(missing):
        # Without a plan it is not known whose ranks those are; the hosts that cannot reach rank 0 account for all.
        return
    if len(by_host) > _HOSTS_APART:
        by_host = {folding.hosts(by_host): [rank for numbers in by_host.values() for rank in numbers]}
    for host, numbers in by_host.items():
        where = f" on {host}" if host else ""
        yield Finding("bad", "missing",
                      f"{folding.ranks(numbers)}{where} did not report within {gathered.waited_s:.0f} s",
                      f"see logs/rank{numbers[0]:04d}.log in the run directory and whether {host or 'its host'} "
                      "answers; launch --hosts leaves hosts out")


def _gone(gathered: Gathered) -> Iterator[Finding]:
    lost = [((facts["host"], facts[LOST]), facts["rank"]) for facts in gathered.facts if LOST in facts]
    for (host, stage), numbers in collected(lost).items():
        yield Finding("bad", "missing", f"{folding.ranks(numbers)} on {host} ended during {stage_name(stage)}",
                      "see its log in the run directory")
    silent = [(facts["host"], facts["rank"]) for facts in gathered.facts
              if "cores" not in facts and LOST not in facts]
    for host, numbers in collected(silent).items():
        yield Finding("bad", "missing", f"{folding.ranks(numbers)} on {host} came up, but could not read the "
                                        "host's facts in time",
                      "a file system that hangs there is the usual cause (df, mount)")
    yield from _stuck(gathered)


def _stuck(gathered: Gathered) -> Iterator[Finding]:
    stuck = [facts for facts in gathered.told if facts.get(STUCK, MPI) != MPI and LOST not in facts]
    slow_start = [facts for facts in stuck if facts[STUCK] == READY]
    if len(slow_start) > len(gathered.told) / 2:
        yield Finding("warn", "torch", f"torch is still being imported by {len(slow_start)} of "
                                       f"{len(gathered.told)} ranks: nothing could be measured there",
                      "a slow shared file system: launch --stage-env runs from each host's own disk")
        stuck = [facts for facts in stuck if facts[STUCK] != READY]
    places = [((facts["host"], facts[STUCK]), facts["rank"]) for facts in stuck]
    for (host, stage), numbers in collected(places).items():
        yield Finding("bad", "missing", f"{folding.ranks(numbers)} on {host} did not come back from "
                                        f"{stage_name(stage)}",
                      "look there at what the processes wait for (py-spy dump, dmesg)")


def _mpi(gathered: Gathered) -> Iterator[Finding]:
    answers = [(facts, answer) for facts, answer in gathered.measured(MPI)]
    wrong = [((answer["size"], answer.get("library", "")), facts["rank"]) for facts, answer in answers
             if facts["world_size"] == gathered.world_size
             and (answer["rank"], answer["size"]) != (facts["rank"], facts["world_size"])]
    for (size, library), numbers in collected(wrong).items():
        yield Finding("warn", "MPI", f"MPI ({library}) counts {size} rank(s) where the environment counts "
                                     f"{gathered.world_size} ({folding.ranks(numbers)})",
                      "for programs that use MPI: the mpiexec (or srun --mpi plug-in) of mpi4py's own MPI library")
    failed = [(facts["stages"][MPI]["error"], facts["rank"]) for facts in gathered.told
              if "error" in facts.get("stages", {}).get(MPI, {})]
    failed += [("it hangs", facts["rank"]) for facts in gathered.told if facts.get(STUCK) == MPI]
    for error, numbers in collected(failed).items():
        yield Finding("warn", "MPI", f"MPI cannot be started by {folding.ranks(numbers)}: {error}",
                      "only programs that use MPI are hurt: the mpi4py that fits this launcher")
