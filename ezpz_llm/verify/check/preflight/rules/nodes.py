"""Rules for ranks and nodes: presence, devices, cores, memory, disks, clocks and software."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ezpz_llm.core.base import count_noun, group_by_key
from ezpz_llm.core.rundir.records import Finding
from ezpz_llm.launcher.basics.hostlist import fold_numbers, rank_ranges
from ezpz_llm.launcher.basics.hostnames import NodeNames
from ezpz_llm.launcher.basics.variables import SHARED_DEVICES_VARIABLE, WARN
from ezpz_llm.verify.check.facts import Facts, Failed, Mpi, Ready, find_answer
from ezpz_llm.verify.check.findings import Level
from ezpz_llm.verify.check.preflight.rules.gathered import (
    MPI,
    READY,
    Gathered,
    describe_differences,
    format_bytes,
    node_ranges,
    stage_name,
)

MIN_SHARED_MEMORY = 2**28
"""Minimum free bytes of /dev/shm. With the 64 MiB of containers, SIGBUS kills data loaders and NCCL."""
MIN_TEMPORARY_SPACE = 2**28
MIN_MEMORY_PER_RANK = 2**30
_MIN_DEVICE_SHARE = 0.8
"""Minimum free fraction of a device's memory. If less is free, another process probably uses the device."""
_CLOCK_OFFSET_S = 2.0


def _device_of(facts: Facts) -> str | None:
    """Return a rank's accelerator, by UUID or PCI address if known, else by its visible index; None for CPU."""
    if facts.device and facts.device.identity:
        return facts.device.identity
    ids = facts.devices.ids
    # As in launch: with several visible devices, the local rank selects one.
    index = 0 if len(ids) == 1 else facts.local_rank
    return f"{facts.devices.source} {ids[index]}" if index < len(ids) else None


def _shared_devices(gathered: Gathered) -> Iterator[Finding]:
    """Find ranks that share a device. Nodes on which the same local ranks do so are combined into one finding."""
    def shared() -> Iterator[tuple[tuple[Level, tuple[int, ...]], tuple[str, str]]]:
        """Yield (level, local ranks that share a device) and (node, device)."""
        for host, ranks in gathered.by_node().items():
            # Ranks that use the CPU are not slowed by sharing a GPU.
            is_allowed = os.environ.get(SHARED_DEVICES_VARIABLE) == WARN or any(
                facts.device and facts.device.kind == "cpu" for facts in ranks)
            level: Level = "warn" if is_allowed else "bad"
            owners = group_by_key((device, facts.local_rank) for facts in ranks if (device := _device_of(facts)))
            yield from (((level, tuple(local_ranks)), (host, device)) for device, local_ranks in owners.items()
                        if len(local_ranks) > 1)

    for (level, shared_by), places in group_by_key(shared()).items():
        more = " and more elsewhere" if len({device for _, device in places}) > 1 else ""
        names = node_ranges(host for host, _ in places)
        yield Finding(level, "devices",
                      f"on {names} local ranks {fold_numbers(shared_by)} share one device ({places[0][1]}{more})",
                      "start one rank per device (launch --ppn), or mask each rank's devices")


def _unused_devices(gathered: Gathered) -> Iterator[Finding]:
    on_cpu = [facts for facts, ready in gathered.measured(Ready)
              if ready.device.kind == "cpu" and facts.devices.ids]
    if on_cpu:
        driver = all(facts.devices.installed for facts in on_cpu)
        names = node_ranges(facts.host for facts in on_cpu)
        yield Finding("bad" if driver else "warn", "devices",
                      f"torch uses the CPU on {names}, although {on_cpu[0].devices.source} shows "
                      f"{count_noun(len(on_cpu[0].devices.ids), 'device')}",
                      "install a torch built for these devices and their driver (ezpz-llm doctor shows both)")


def _device_differences(gathered: Gathered) -> Iterator[Finding]:
    devices = {facts.host: ready.device for facts, ready in gathered.measured(Ready)}
    kinds = describe_differences({host: device.kind for host, device in devices.items()})
    names = describe_differences({host: device.name for host, device in devices.items() if device.name})
    if text := kinds or names:
        yield Finding("bad" if kinds else "warn", "devices", f"the devices differ: {text}",
                      "select nodes of one kind with launch --hosts")


def _devices_in_use(gathered: Gathered) -> Iterator[Finding]:
    for facts, ready in gathered.measured(Ready):
        free, total = ready.device.free, ready.device.total
        if free is not None and total and free < _MIN_DEVICE_SHARE * total:
            yield Finding("warn", "devices",
                          f"the device of rank {facts.rank} on {facts.host} has only {format_bytes(free)} of "
                          f"{format_bytes(total)} free",
                          "end the processes of earlier runs there (nvidia-smi, rocm-smi, xpu-smi)")


def _core_problems(gathered: Gathered) -> Iterator[Finding]:
    same = group_by_key((problem, host) for host, ranks in gathered.by_node().items()
                        if (problem := _shared_cores(ranks)))
    for (level, text), names in same.items():
        yield Finding(level, "cores", f"on {node_ranges(names)} {text}",
                      "let launch bind the ranks (--bind auto), or request more cores per task from the scheduler")


def _shared_cores(ranks: Sequence[Facts]) -> tuple[Level, str] | None:
    """Return level and text if ranks share cores while other cores idle, or if ranks outnumber cores."""
    masks = [set(facts.cores) for facts in ranks]
    used = set().union(*masks)
    idle = set(ranks[0].host_cores) - used
    if len(used) < len(ranks):
        more = f", while cores {fold_numbers(idle)} are idle" if idle else ""
        return ("bad" if idle else "warn",
                f"{len(ranks)} ranks run on {count_noun(len(used), 'core')} ({fold_numbers(used)}){more}")
    sharing = [facts.rank for facts, mask in zip(ranks, masks, strict=True)
               if sum(bool(mask & other) for other in masks) > 1]
    # Ranks that may all use every core of the node are unbound, which is fine.
    if sharing and idle:
        return "warn", (f"{rank_ranges(sharing)} share cores, while cores {fold_numbers(idle)} "
                        "are idle")
    return None


def _low_space(gathered: Gathered) -> Iterator[Finding]:
    needs = [(host, *need) for host, ranks in gathered.by_node().items() for need in (
        (f"memory for {count_noun(len(ranks), 'rank')}", ranks[0].memory.free,
         MIN_MEMORY_PER_RANK * len(ranks),
         "end other processes there, or start fewer ranks per node"),
        ("/dev/shm", ranks[0].shm.free, MIN_SHARED_MEMORY,
         "enlarge it (docker --shm-size, mount -o remount,size=…)"),
        (ranks[0].tmp.path, ranks[0].tmp.free, MIN_TEMPORARY_SPACE, "free space there, or set TMPDIR"))]
    short = group_by_key(((f"only {format_bytes(free)} of {name}", instead), host)
                         for host, name, free, minimum, instead in needs if free is not None and free < minimum)
    for (text, instead), names in short.items():
        yield Finding("warn", "space", f"{node_ranges(names)}: {text} free", instead)


def _clock_offsets(gathered: Gathered) -> Iterator[Finding]:
    for facts in gathered.reporting:
        offset, within = facts.clock or (0.0, 0.0)
        if abs(offset) - within > _CLOCK_OFFSET_S:
            yield Finding("warn", "clock", f"the clock of {facts.host} is {abs(offset):.1f} s "
                                           f"{'ahead of' if offset > 0 else 'behind'} rank 0's",
                          "run chrony or ntpd there; times in logs cannot be compared")


_MAX_SEPARATE_NODES = 4
"""Maximum number of nodes with missing ranks that get separate findings."""


def _stale_variables(gathered: Gathered) -> Iterator[Finding]:
    for note, numbers in group_by_key((note, facts.rank) for facts in gathered.reporting
                                      for note in facts.rank_notes).items():
        yield Finding("warn", "ranks", f"{rank_ranges(numbers)}: {note}",
                      "launch from a shell without stale rank variables")


def _duplicate_ranks(gathered: Gathered) -> Iterator[Finding]:
    processes = group_by_key((facts.rank, f"{facts.host} (pid {facts.pid}, {facts.rank_source})"
                              if isinstance(facts, Facts) else f"{facts.host} (pid ?, source unknown)")
                             for facts in gathered.facts)
    for rank, places in sorted(processes.items()):
        if len(places) > 1:
            yield Finding("bad", "ranks", f"{len(places)} processes have rank {rank}: {', '.join(places)}",
                          "start ranks only with launch, and unset rank variables (RANK, PMI_RANK, …) that a "
                          "shell exports")


def _wrong_world_sizes(gathered: Gathered) -> Iterator[Finding]:
    differing = group_by_key((facts.world_size, facts.rank) for facts in gathered.reporting
                             if facts.world_size != gathered.world_size)
    for size, numbers in differing.items():
        yield Finding("bad", "ranks", f"world size is {size} on {rank_ranges(numbers)}, but "
                                      f"{gathered.world_size} on rank 0", "start all ranks with one launch")


def _missing_ranks(gathered: Gathered) -> Iterator[Finding]:
    present = {facts.rank for facts in gathered.facts}
    missing = [rank for rank in range(gathered.world_size) if rank not in present]
    unreached = NodeNames(report.host for report in gathered.unreached)
    planned = dict(enumerate(gathered.hosts))
    by_node = group_by_key((host, rank) for rank in missing
                           if (host := planned.get(rank, "")) not in unreached)
    if not gathered.hosts and sum(report.ranks_there for report in gathered.unreached) >= len(missing):
        # Without a plan, assume that all missing ranks are on the nodes that cannot reach rank 0.
        return
    if len(by_node) > _MAX_SEPARATE_NODES:
        by_node = {node_ranges(by_node): [rank for numbers in by_node.values() for rank in numbers]}
    for host, numbers in by_node.items():
        where = f" on {host}" if host else ""
        yield Finding("bad", "missing",
                      f"{rank_ranges(numbers)}{where} did not report within {gathered.waited_s:.0f} s",
                      f"see logs/rank{numbers[0]:04d}.log in the run directory and check that {host or 'its node'} "
                      "responds; launch --hosts excludes nodes")


def _lost_ranks(gathered: Gathered) -> Iterator[Finding]:
    lost = group_by_key(((facts.host, facts.lost_in), facts.rank) for facts in gathered.facts if facts.lost_in)
    for (host, stage), numbers in lost.items():
        yield Finding("bad", "missing", f"{rank_ranges(numbers)} on {host} ended during {stage_name(stage)}",
                      "see its log in the run directory")
    silent = group_by_key((facts.host, facts.rank) for facts in gathered.facts
                          if not isinstance(facts, Facts) and not facts.lost_in)
    for host, numbers in silent.items():
        yield Finding("bad", "missing", f"{rank_ranges(numbers)} on {host} started, but sent no facts in time",
                      "check for a hanging file system there (df, mount)")


def _stuck_ranks(gathered: Gathered) -> Iterator[Finding]:
    stuck = group_by_key((facts.stuck_in, facts) for facts in gathered.reporting if facts.stuck_in)
    # _mpi_problems reports MPI.
    stuck.pop(MPI, None)
    if len(stuck.get(READY, ())) > len(gathered.reporting) / 2:
        yield Finding("warn", "torch", f"{len(stuck.pop(READY))} of {len(gathered.reporting)} ranks are still "
                                       "importing torch: nothing could be measured there",
                      "if the shared file system is slow, run from local disks with launch --stage-env")
    for stage, ranks in stuck.items():
        for host, numbers in group_by_key((facts.host, facts.rank) for facts in ranks).items():
            yield Finding("bad", "missing", f"{rank_ranges(numbers)} on {host} did not finish {stage_name(stage)}",
                          "check there what the processes wait for (py-spy dump, dmesg)")


def _mpi_problems(gathered: Gathered) -> Iterator[Finding]:
    wrong = group_by_key(((mpi.size, mpi.library), facts.rank) for facts, mpi in gathered.measured(Mpi)
                         if facts.world_size == gathered.world_size
                         and (mpi.rank, mpi.size) != (facts.rank, facts.world_size))
    for (size, library), numbers in wrong.items():
        yield Finding("warn", "MPI", f"MPI ({library}) has {count_noun(size, 'rank')}, but the environment has "
                                     f"{gathered.world_size} ({rank_ranges(numbers)})",
                      "if the program uses MPI, use the mpiexec (or srun --mpi plug-in) of mpi4py's MPI library")
    failed = [(answer.error, facts.rank) for facts, answer in gathered.measured(Failed, MPI)]
    failed += [("it hangs", facts.rank) for facts in gathered.reporting if facts.stuck_in == MPI]
    for error, numbers in group_by_key(failed).items():
        yield Finding("warn", "MPI", f"{rank_ranges(numbers)} cannot start MPI: {error}",
                      "if the program uses MPI, install an mpi4py that matches this launcher")


_MUST_MATCH = ("torch", "deepspeed", "ezpz_llm")
_PATH_LISTS = ("LD_LIBRARY_PATH", "PYTHONPATH", "LD_PRELOAD")
_MPI_NAME = "MPI library"
_MAX_LENGTH = 60
_UNSET = "unset"


def _software_differences(gathered: Gathered) -> Iterator[Finding]:
    tables = {place: _versions(ranks) for place, ranks in _units_to_compare(gathered).items()}
    for name in dict.fromkeys(name for table in tables.values() for name in table):
        # A missing entry means that the node's MPI library is unknown, not that it has none.
        values = {place: table.get(name, "none") for place, table in tables.items()
                  if name in table or name != _MPI_NAME}
        if text := describe_differences(values):
            minors = {version.rpartition(".")[0] for version in values.values()}
            level: Level = "bad" if name in _MUST_MATCH or (name == "python" and len(minors) > 1) else "warn"
            yield Finding(level, "versions", f"{name} differs: {text}",
                          "use one environment on all nodes, on a shared file system or with launch --stage-env")


def _variable_differences(gathered: Gathered) -> Iterator[Finding]:
    variables = {place: ranks[0].environment for place, ranks in _units_to_compare(gathered).items()}
    for name in sorted({name for values in variables.values() for name in values}):
        values = {place: environment.get(name, _UNSET) for place, environment in variables.items()}
        if len(set(values.values())) > 1:
            yield Finding("warn", "environment", f"{name} differs: {_difference(name, values)}",
                          "set it before launch, not in start-up files of some nodes (~/.bashrc, modules)")


def _units_to_compare(gathered: Gathered) -> dict[str, list[Facts]]:
    """Return the facts to compare: by node, or by rank if the ranks of a node differ."""
    places: dict[str, list[Facts]] = {}
    for host, ranks in gathered.by_node().items():
        alike = all(rank.versions == ranks[0].versions and rank.environment == ranks[0].environment
                    for rank in ranks)
        places |= {host: ranks} if alike else {f"rank {rank.rank} on {host}": [rank] for rank in ranks}
    return places


def _versions(ranks: Sequence[Facts]) -> Mapping[str, str]:
    # Prefer the versions that torch and MPI reported when they were loaded.
    torch = [ready.torch for rank in ranks if (ready := find_answer(rank.stages, Ready))]
    mpi = [mpi.library for rank in ranks if (mpi := find_answer(rank.stages, Mpi))]
    return ranks[0].versions | {name: loaded[0] for name, loaded in (("torch", torch), (_MPI_NAME, mpi)) if loaded}


def _difference(name: str, values: Mapping[str, str]) -> str:
    """Describe how values differ, for path lists by missing and additional folders. Shortens long values."""
    if name not in _PATH_LISTS:
        text = describe_differences({place: _short(value) for place, value in values.items()})
        return text or "only after the first characters"
    usual = Counter(values.values()).most_common(1)[0][0]

    def change(value: str) -> str:
        """Return the folders that a path list has in addition to, or lacks from, the most common list."""
        added = [part for part in _parts(value) if part not in _parts(usual)]
        lacking = [part for part in _parts(usual) if part not in _parts(value)]
        parts = ([f"adds {' '.join(added)}"] if added else []) + ([f"lacks {' '.join(lacking)}"] if lacking else [])
        return ", ".join(parts) or "different order"

    changes = group_by_key((change(value), place) for place, value in values.items() if value != usual)
    return "; ".join(f"{node_ranges(places)}: {_short(text, 2 * _MAX_LENGTH)}" for text, places in changes.items())


def _parts(value: str) -> list[str]:
    return [part for part in value.split(":") if part and value != _UNSET]


def _short(value: str, width: int = _MAX_LENGTH) -> str:
    return value if len(value) <= width else f"{value[:width - 1]}…"


RANK_RULES = (_duplicate_ranks, _wrong_world_sizes, _missing_ranks, _lost_ranks, _stuck_ranks, _mpi_problems,
              _stale_variables)
"""Rules for rank numbers, and for missing, lost or hanging ranks."""
NODE_RULES = (_shared_devices, _unused_devices, _device_differences, _devices_in_use, _core_problems, _low_space,
              _clock_offsets, _software_differences, _variable_differences)
"""Rules for devices, cores, memory, disks, clocks, and for differing software and variables."""
