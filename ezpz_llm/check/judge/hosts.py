"""Judges ranks and nodes: all there once, with devices and cores of their own, room, and the right time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ezpz_llm.check.judge.gathered import (
    MPI,
    READY,
    Facts,
    Finding,
    Gathered,
    Level,
    collected,
    differing,
    format_bytes,
    host_ranges,
    rank_ranges,
    stage_name,
)
from ezpz_llm.launch.devices import core_ranges

LEAST_SHARED_MEMORY = 2**28
"""Bytes of free /dev/shm: containers give 64 MiB, with which data loaders and NCCL die of SIGBUS."""
LEAST_TEMPORARY = 2**28
LEAST_MEMORY_A_RANK = 2**30
LEAST_DEVICE_SHARE = 0.8
"""Of a device's memory, free before anything runs; less is another process's work."""
CLOCK_OFFSET_S = 2.0


def judge(gathered: Gathered) -> Iterator[Finding]:
    """Findings on devices, cores, memory, disks and clocks."""
    yield from _devices(gathered)
    yield from _cores(gathered)
    yield from _room(gathered)
    yield from _clocks(gathered)


def device_of(facts: Facts) -> str | None:
    """The accelerator of a rank: by UUID or PCI address where torch tells, else by its place among the visible;
    None without any."""
    if identity := _device(facts).get("identity"):
        return str(identity)
    ids = facts["devices"]["ids"]
    if not ids:
        return None
    # The rule of launch: a single visible device is this rank's, of several the local rank's.
    index = 0 if len(ids) == 1 else facts["local_rank"]
    return f"{facts['devices']['source']} {ids[index]}" if index < len(ids) else None


def _device(facts: Facts) -> Facts:
    return facts.get("stages", {}).get(READY, {}).get("device", {})


def _devices(gathered: Gathered) -> Iterator[Finding]:
    yield from _shared(gathered)
    yield from _unused(gathered)
    yield from _kinds(gathered)
    yield from _full(gathered)


def _shared(gathered: Gathered) -> Iterator[Finding]:
    """Ranks of a host on one device; hosts on which the same local ranks do so make one finding."""
    found: dict[tuple[Level, tuple[int, ...]], list[tuple[str, str]]] = {}
    for host, ranks in gathered.by_host().items():
        # Ranks that compute on the CPU all the same are not slowed down by it.
        level: Level = "warn" if any(_device(facts).get("kind") == "cpu" for facts in ranks) else "bad"
        owners = collected((device, facts["local_rank"]) for facts in ranks if (device := device_of(facts)))
        for device, local_ranks in owners.items():
            if len(local_ranks) > 1:
                found.setdefault((level, tuple(local_ranks)), []).append((host, device))
    for (level, shared_by), places in found.items():
        more = " and likewise elsewhere" if len({device for _, device in places}) > 1 else ""
        names = host_ranges(host for host, _ in places)
        yield Finding(level, "devices",
                      f"on {names} local ranks {core_ranges(shared_by)} share one device ({places[0][1]}{more})",
                      "as many ranks a host as it has devices (launch --ppn), or a mask that shows each its own")


def _unused(gathered: Gathered) -> Iterator[Finding]:
    on_cpu = [facts for facts, answer in gathered.measured(READY)
              if answer["device"]["kind"] == "cpu" and facts["devices"]["ids"]]
    if on_cpu:
        driver = all(facts["devices"]["installed"] for facts in on_cpu)
        names = host_ranges(facts["host"] for facts in on_cpu)
        yield Finding("bad" if driver else "warn", "devices",
                      f"torch computes on the CPU on {names}, though {on_cpu[0]['devices']['source']} shows "
                      f"{len(on_cpu[0]['devices']['ids'])} device(s)",
                      "a torch built for these devices and their driver (ezpz-llm doctor says which is installed)")


def _kinds(gathered: Gathered) -> Iterator[Finding]:
    for member in ("kind", "name"):
        values = {facts["host"]: answer["device"][member] for facts, answer in gathered.measured(READY)
                  if answer["device"].get(member)}
        if text := differing(values):
            yield Finding("bad" if member == "kind" else "warn", "devices", f"the devices differ: {text}",
                          "hosts of one kind: launch --hosts")
            return


def _full(gathered: Gathered) -> Iterator[Finding]:
    for facts, answer in gathered.measured(READY):
        device = answer["device"]
        if device.get("total") and device["free"] < LEAST_DEVICE_SHARE * device["total"]:
            free, total = format_bytes(device["free"]), format_bytes(device["total"])
            yield Finding("warn", "devices",
                          f"the device of rank {facts['rank']} on {facts['host']} has only {free} of {total} free",
                          "end the processes of earlier runs there (nvidia-smi, rocm-smi, xpu-smi)")


def _cores(gathered: Gathered) -> Iterator[Finding]:
    same: dict[tuple[str, ...], list[str]] = {}
    for host, ranks in gathered.by_host().items():
        if found := _shared_cores(ranks):
            same.setdefault(found, []).append(host)
    for (level, text), names in same.items():
        yield Finding("bad" if level == "bad" else "warn", "cores", f"on {host_ranges(names)} {text}",
                      "let launch bind the ranks (--bind auto), or ask the scheduler for more cores a task")


def _shared_cores(ranks: Sequence[Facts]) -> tuple[str, str] | None:
    """Whether ranks crowd on few cores while others idle, or are simply more than the cores."""
    masks = [set(facts["cores"]) for facts in ranks]
    used = set().union(*masks)
    idle = set(ranks[0]["host_cores"]) - used
    if len(used) < len(ranks):
        more = f", while cores {core_ranges(tuple(sorted(idle)))} have none" if idle else ""
        return ("bad" if idle else "warn",
                f"{len(ranks)} ranks run on {len(used)} core(s) ({core_ranges(tuple(sorted(used)))}){more}")
    sharing = [facts["rank"] for facts, mask in zip(ranks, masks, strict=True)
               if sum(bool(mask & other) for other in masks) > 1]
    # Ranks that all may use the whole host are unbound, which is no mistake.
    if sharing and idle:
        return "warn", (f"{rank_ranges(sharing)} share cores, while cores {core_ranges(tuple(sorted(idle)))} "
                        "have no rank")
    return None


def _room(gathered: Gathered) -> Iterator[Finding]:
    short: dict[tuple[str, str], list[str]] = {}
    for host, ranks in gathered.by_host().items():
        first = ranks[0]
        needed = LEAST_MEMORY_A_RANK * len(ranks)
        wants = ((f"memory for {len(ranks)} rank(s)", first["memory"]["free"], needed,
                  "end other processes there, or fewer ranks a host"),
                 ("/dev/shm", first["shm"]["free"], LEAST_SHARED_MEMORY,
                  "a larger one (docker --shm-size, mount -o remount,size=…)"),
                 (first["tmp"]["path"], first["tmp"]["free"], LEAST_TEMPORARY, "make room there, or set TMPDIR"))
        for name, free, least, instead in wants:
            if free is not None and free < least:
                short.setdefault((f"only {format_bytes(free)} of {name}", instead), []).append(host)
    for (text, instead), names in short.items():
        yield Finding("warn", "room", f"{host_ranges(names)}: {text} free", instead)


def _clocks(gathered: Gathered) -> Iterator[Finding]:
    for facts in gathered.told:
        offset, within = facts.get("clock", (0.0, 0.0))
        if abs(offset) - within > CLOCK_OFFSET_S:
            yield Finding("warn", "clock", f"the clock of {facts['host']} is {abs(offset):.1f} s "
                                           f"{'ahead of' if offset > 0 else 'behind'} rank 0's",
                          "chrony or ntpd there: times in logs cannot be compared")


# Are all ranks there, each once, and do the environment and MPI count them alike?
LOST, STUCK = "lost_in", "stuck_in"
"""Members of a rank's facts: the stage in which its connection ended, or which it did not answer."""

_HOSTS_APART = 4
"""Up to so many hosts whose ranks are missing are named each by itself."""


def judge_ranks(gathered: Gathered) -> Iterator[Finding]:
    """Findings on the numbering of ranks and on those that are missing or went away."""
    yield from _duplicates(gathered)
    yield from _sizes(gathered)
    yield from _missing(gathered)
    yield from _gone(gathered)
    yield from _mpi(gathered)
    for note, numbers in collected([(note, facts["rank"]) for facts in gathered.told
                                   for note in facts.get("rank_notes", ())]).items():
        yield Finding("warn", "ranks", f"{rank_ranges(numbers)}: {note}",
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
        yield Finding("bad", "ranks", f"{rank_ranges(numbers)} in a world of {size}, rank 0 in one of "
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
        by_host = {host_ranges(by_host): [rank for numbers in by_host.values() for rank in numbers]}
    for host, numbers in by_host.items():
        where = f" on {host}" if host else ""
        yield Finding("bad", "missing",
                      f"{rank_ranges(numbers)}{where} did not report within {gathered.waited_s:.0f} s",
                      f"see logs/rank{numbers[0]:04d}.log in the run directory and whether {host or 'its host'} "
                      "answers; launch --hosts leaves hosts out")


def _gone(gathered: Gathered) -> Iterator[Finding]:
    lost = [((facts["host"], facts[LOST]), facts["rank"]) for facts in gathered.facts if LOST in facts]
    for (host, stage), numbers in collected(lost).items():
        yield Finding("bad", "missing", f"{rank_ranges(numbers)} on {host} ended during {stage_name(stage)}",
                      "see its log in the run directory")
    silent = [(facts["host"], facts["rank"]) for facts in gathered.facts
              if "cores" not in facts and LOST not in facts]
    for host, numbers in collected(silent).items():
        yield Finding("bad", "missing", f"{rank_ranges(numbers)} on {host} came up, but could not read the "
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
        yield Finding("bad", "missing", f"{rank_ranges(numbers)} on {host} did not come back from "
                                        f"{stage_name(stage)}",
                      "look there at what the processes wait for (py-spy dump, dmesg)")


def _mpi(gathered: Gathered) -> Iterator[Finding]:
    answers = [(facts, answer) for facts, answer in gathered.measured(MPI)]
    wrong = [((answer["size"], answer.get("library", "")), facts["rank"]) for facts, answer in answers
             if facts["world_size"] == gathered.world_size
             and (answer["rank"], answer["size"]) != (facts["rank"], facts["world_size"])]
    for (size, library), numbers in collected(wrong).items():
        yield Finding("warn", "MPI", f"MPI ({library}) counts {size} rank(s) where the environment counts "
                                     f"{gathered.world_size} ({rank_ranges(numbers)})",
                      "for programs that use MPI: the mpiexec (or srun --mpi plug-in) of mpi4py's own MPI library")
    failed = [(facts["stages"][MPI]["error"], facts["rank"]) for facts in gathered.told
              if "error" in facts.get("stages", {}).get(MPI, {})]
    failed += [("it hangs", facts["rank"]) for facts in gathered.told if facts.get(STUCK) == MPI]
    for error, numbers in collected(failed).items():
        yield Finding("warn", "MPI", f"MPI cannot be started by {rank_ranges(numbers)}: {error}",
                      "only programs that use MPI are hurt: the mpi4py that fits this launcher")
