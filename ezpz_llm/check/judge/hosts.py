"""Judges ranks and nodes: all there once, with devices and cores of their own, room, and the right time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ezpz_llm.base import counted, grouped
from ezpz_llm.check.judge.gathered import (
    MPI,
    READY,
    Facts,
    Finding,
    Gathered,
    Level,
    answer_of,
    differing,
    format_bytes,
    host_ranges,
    stage_name,
)
from ezpz_llm.launch.hostlist import fold_numbers, rank_ranges
from ezpz_llm.launch.hostnames import NodeNames

LEAST_SHARED_MEMORY = 2**28
"""Bytes of free /dev/shm: containers give 64 MiB, with which data loaders and NCCL die of SIGBUS."""
LEAST_TEMPORARY = 2**28
LEAST_MEMORY_A_RANK = 2**30
LEAST_DEVICE_SHARE = 0.8
"""Of a device's memory, free before anything runs; less is another process's work."""
CLOCK_OFFSET_S = 2.0


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
    return answer_of(facts, READY).get("device", {})


def _shared(gathered: Gathered) -> Iterator[Finding]:
    """Ranks of a host on one device; hosts on which the same local ranks do so make one finding."""
    def shared() -> Iterator[tuple[tuple[Level, tuple[int, ...]], tuple[str, str]]]:
        for host, ranks in gathered.by_host().items():
            # Ranks that compute on the CPU all the same are not slowed down by it.
            level: Level = "warn" if any(_device(facts).get("kind") == "cpu" for facts in ranks) else "bad"
            owners = grouped((device, facts["local_rank"]) for facts in ranks if (device := device_of(facts)))
            yield from (((level, tuple(own)), (host, device)) for device, own in owners.items() if len(own) > 1)

    for (level, shared_by), places in grouped(shared()).items():
        more = " and likewise elsewhere" if len({device for _, device in places}) > 1 else ""
        names = host_ranges(host for host, _ in places)
        yield Finding(level, "devices",
                      f"on {names} local ranks {fold_numbers(shared_by)} share one device ({places[0][1]}{more})",
                      "as many ranks a host as it has devices (launch --ppn), or a mask that shows each its own")


def _unused(gathered: Gathered) -> Iterator[Finding]:
    on_cpu = [facts for facts, answer in gathered.measured(READY)
              if answer["device"]["kind"] == "cpu" and facts["devices"]["ids"]]
    if on_cpu:
        driver = all(facts["devices"]["installed"] for facts in on_cpu)
        names = host_ranges(facts["host"] for facts in on_cpu)
        yield Finding("bad" if driver else "warn", "devices",
                      f"torch computes on the CPU on {names}, though {on_cpu[0]['devices']['source']} shows "
                      f"{counted(len(on_cpu[0]['devices']['ids']), 'device')}",
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
    same = grouped((found, host) for host, ranks in gathered.by_host().items() if (found := _shared_cores(ranks)))
    for (level, text), names in same.items():
        yield Finding(level, "cores", f"on {host_ranges(names)} {text}",
                      "let launch bind the ranks (--bind auto), or ask the scheduler for more cores a task")


def _shared_cores(ranks: Sequence[Facts]) -> tuple[Level, str] | None:
    """Whether ranks crowd on few cores while others idle, or are simply more than the cores."""
    masks = [set(facts["cores"]) for facts in ranks]
    used = set().union(*masks)
    idle = set(ranks[0]["host_cores"]) - used
    if len(used) < len(ranks):
        more = f", while cores {fold_numbers(idle)} have none" if idle else ""
        return ("bad" if idle else "warn",
                f"{len(ranks)} ranks run on {counted(len(used), 'core')} ({fold_numbers(used)}){more}")
    sharing = [facts["rank"] for facts, mask in zip(ranks, masks, strict=True)
               if sum(bool(mask & other) for other in masks) > 1]
    # Ranks that all may use the whole host are unbound, which is no mistake.
    if sharing and idle:
        return "warn", (f"{rank_ranges(sharing)} share cores, while cores {fold_numbers(idle)} "
                        "have no rank")
    return None


def _room(gathered: Gathered) -> Iterator[Finding]:
    wants = [(host, *want) for host, ranks in gathered.by_host().items() for want in (
        (f"memory for {counted(len(ranks), 'rank')}", ranks[0]["memory"]["free"], LEAST_MEMORY_A_RANK * len(ranks),
         "end other processes there, or fewer ranks a host"),
        ("/dev/shm", ranks[0]["shm"]["free"], LEAST_SHARED_MEMORY,
         "a larger one (docker --shm-size, mount -o remount,size=…)"),
        (ranks[0]["tmp"]["path"], ranks[0]["tmp"]["free"], LEAST_TEMPORARY, "make room there, or set TMPDIR"))]
    short = grouped(((f"only {format_bytes(free)} of {name}", instead), host)
                    for host, name, free, least, instead in wants if free is not None and free < least)
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


def _left_over(gathered: Gathered) -> Iterator[Finding]:
    for note, numbers in grouped((note, facts["rank"]) for facts in gathered.told
                                 for note in facts.get("rank_notes", ())).items():
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
    for size, numbers in grouped([(facts["world_size"], facts["rank"]) for facts in wrong]).items():
        yield Finding("bad", "ranks", f"{rank_ranges(numbers)} in a world of {size}, rank 0 in one of "
                                      f"{gathered.world_size}", "one launcher for all hosts: launch")


def _missing(gathered: Gathered) -> Iterator[Finding]:
    there = {facts["rank"] for facts in gathered.facts}
    missing = [rank for rank in range(gathered.world_size) if rank not in there]
    unreached = NodeNames(facts["host"] for facts in gathered.unreached)
    planned = dict(enumerate(gathered.hosts))
    by_host = grouped((host, rank) for rank in missing
                      if (host := planned.get(rank, "")) not in unreached)
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
    for (host, stage), numbers in grouped(lost).items():
        yield Finding("bad", "missing", f"{rank_ranges(numbers)} on {host} ended during {stage_name(stage)}",
                      "see its log in the run directory")
    silent = [(facts["host"], facts["rank"]) for facts in gathered.facts
              if "cores" not in facts and LOST not in facts]
    for host, numbers in grouped(silent).items():
        yield Finding("bad", "missing", f"{rank_ranges(numbers)} on {host} came up, but could not read the "
                                        "host's facts in time",
                      "a file system that hangs there is the usual cause (df, mount)")


def _stuck(gathered: Gathered) -> Iterator[Finding]:
    stuck = [facts for facts in gathered.told if facts.get(STUCK, MPI) != MPI and LOST not in facts]
    slow_start = [facts for facts in stuck if facts[STUCK] == READY]
    if len(slow_start) > len(gathered.told) / 2:
        yield Finding("warn", "torch", f"torch is still being imported by {len(slow_start)} of "
                                       f"{len(gathered.told)} ranks: nothing could be measured there",
                      "a slow shared file system: launch --stage-env runs from each host's own disk")
        stuck = [facts for facts in stuck if facts[STUCK] != READY]
    places = [((facts["host"], facts[STUCK]), facts["rank"]) for facts in stuck]
    for (host, stage), numbers in grouped(places).items():
        yield Finding("bad", "missing", f"{rank_ranges(numbers)} on {host} did not come back from "
                                        f"{stage_name(stage)}",
                      "look there at what the processes wait for (py-spy dump, dmesg)")


def _mpi(gathered: Gathered) -> Iterator[Finding]:
    answers = [(facts, answer) for facts, answer in gathered.measured(MPI)]
    wrong = [((answer["size"], answer.get("library", "")), facts["rank"]) for facts, answer in answers
             if facts["world_size"] == gathered.world_size
             and (answer["rank"], answer["size"]) != (facts["rank"], facts["world_size"])]
    for (size, library), numbers in grouped(wrong).items():
        yield Finding("warn", "MPI", f"MPI ({library}) counts {counted(size, 'rank')} where the environment counts "
                                     f"{gathered.world_size} ({rank_ranges(numbers)})",
                      "for programs that use MPI: the mpiexec (or srun --mpi plug-in) of mpi4py's own MPI library")
    failed = [(facts["stages"][MPI]["error"], facts["rank"]) for facts in gathered.told
              if "error" in answer_of(facts, MPI)]
    failed += [("it hangs", facts["rank"]) for facts in gathered.told if facts.get(STUCK) == MPI]
    for error, numbers in grouped(failed).items():
        yield Finding("warn", "MPI", f"MPI cannot be started by {rank_ranges(numbers)}: {error}",
                      "only programs that use MPI are hurt: the mpi4py that fits this launcher")


# Software and environment variables that differ between nodes.
_MUST_AGREE = ("torch", "deepspeed", "ezpz_llm")
_LISTS = ("LD_LIBRARY_PATH", "PYTHONPATH", "LD_PRELOAD")
_MPI_NAME = "MPI library"
_LONG = 60
_UNSET = "unset"


def _software(gathered: Gathered) -> Iterator[Finding]:
    tables = {place: _versions(ranks) for place, ranks in _places(gathered).items()}
    for name in dict.fromkeys(name for table in tables.values() for name in table):
        # A host that could not be asked for its MPI is no host without one.
        values = {place: table.get(name, "none") for place, table in tables.items()
                  if name in table or name != _MPI_NAME}
        if text := differing(values):
            minors = {version.rpartition(".")[0] for version in values.values()}
            level: Level = "bad" if name in _MUST_AGREE or (name == "python" and len(minors) > 1) else "warn"
            yield Finding(level, "versions", f"{name} differs: {text}",
                          "the same environment on every host: one on a shared file system, or launch --stage-env")


def _environment(gathered: Gathered) -> Iterator[Finding]:
    variables = {place: ranks[0]["environment"] for place, ranks in _places(gathered).items()}
    for name in sorted({name for values in variables.values() for name in values}):
        values = {place: found.get(name, _UNSET) for place, found in variables.items()}
        if len(set(values.values())) > 1:
            yield Finding("warn", "environment", f"{name} differs: {_difference(name, values)}",
                          "set it before launch, not in a start-up file of some hosts (~/.bashrc, modules)")


def _places(gathered: Gathered) -> dict[str, list[Facts]]:
    """Ranks by what is compared: hosts, or single ranks where the ranks of a host differ."""
    places: dict[str, list[Facts]] = {}
    for host, ranks in gathered.by_host().items():
        alike = all(one["versions"] == ranks[0]["versions"] and one["environment"] == ranks[0]["environment"]
                    for one in ranks)
        places |= {host: ranks} if alike else {f"rank {one['rank']} on {host}": [one] for one in ranks}
    return places


def _versions(ranks: Sequence[Facts]) -> Mapping[str, str]:
    found = dict(ranks[0]["versions"])
    # What torch itself said when it was imported beats what is written beside it.
    for stage, member, name in ((READY, "torch", "torch"), (MPI, "library", _MPI_NAME)):
        told = [answer[member] for one in ranks if member in (answer := answer_of(one, stage))]
        found |= {name: told[0]} if told else {}
    return found


def _difference(name: str, values: Mapping[str, str]) -> str:
    """Of a list of folders only what is missing or more; of a long value only its beginning."""
    if name not in _LISTS:
        shown = differing({place: _short(value) for place, value in values.items()})
        return shown or "beyond what is shown"
    usual = Counter(values.values()).most_common(1)[0][0]

    def change(value: str) -> str:
        """What one list of folders has more or less than the usual one."""
        more = [part for part in _parts(value) if part not in _parts(usual)]
        less = [part for part in _parts(usual) if part not in _parts(value)]
        words = ([f"more: {' '.join(more)}"] if more else []) + ([f"lacks {' '.join(less)}"] if less else [])
        return ", ".join(words) or "another order"

    changes = grouped((change(value), place) for place, value in values.items() if value != usual)
    return "; ".join(f"{host_ranges(places)}: {_short(text, 2 * _LONG)}" for text, places in changes.items())


def _parts(value: str) -> list[str]:
    return [part for part in value.split(":") if part and value != _UNSET]


def _short(value: str, width: int = _LONG) -> str:
    return value if len(value) <= width else f"{value[:width - 1]}…"


RANK_JUDGES = (_duplicates, _sizes, _missing, _gone, _stuck, _mpi, _left_over)
"""Findings on the numbering of ranks, and on those that are missing or went away."""
NODE_JUDGES = (_shared, _unused, _kinds, _full, _cores, _room, _clocks, _software, _environment)
"""Findings on devices, cores, memory, disks and clocks; on software and variables that differ between nodes."""
