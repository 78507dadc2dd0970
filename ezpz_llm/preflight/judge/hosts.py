"""Has each rank a device and cores of its own, and each host room and the right time?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ezpz_llm.launch.devices import core_ranges
from ezpz_llm.preflight.judge import folding
from ezpz_llm.preflight.judge.gathered import READY, Facts, Finding, Gathered, Level, collected

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
        level = "warn" if any(_device(facts).get("kind") == "cpu" for facts in ranks) else "bad"
        owners = collected((device, facts["local_rank"]) for facts in ranks if (device := device_of(facts)))
        for device, local_ranks in owners.items():
            if len(local_ranks) > 1:
                found.setdefault((level, tuple(local_ranks)), []).append((host, device))
    for (level, local_ranks), places in found.items():
        more = " and likewise elsewhere" if len({device for _, device in places}) > 1 else ""
        names = folding.hosts(host for host, _ in places)
        yield Finding(level, "devices",
                      f"on {names} local ranks {core_ranges(local_ranks)} share one device ({places[0][1]}{more})",
                      "as many ranks a host as it has devices (launch --ppn), or a mask that shows each its own")


def _unused(gathered: Gathered) -> Iterator[Finding]:
    on_cpu = [facts for facts, answer in gathered.measured(READY)
              if answer["device"]["kind"] == "cpu" and facts["devices"]["ids"]]
    if on_cpu:
        driver = all(facts["devices"]["installed"] for facts in on_cpu)
        names = folding.hosts(facts["host"] for facts in on_cpu)
        yield Finding("bad" if driver else "warn", "devices",
                      f"torch computes on the CPU on {names}, though {on_cpu[0]['devices']['source']} shows "
                      f"{len(on_cpu[0]['devices']['ids'])} device(s)",
                      "a torch built for these devices and their driver (ezpz-llm doctor says which is installed)")


def _kinds(gathered: Gathered) -> Iterator[Finding]:
    for member in ("kind", "name"):
        values = {facts["host"]: answer["device"][member] for facts, answer in gathered.measured(READY)
                  if answer["device"].get(member)}
        if text := folding.differing(values):
            yield Finding("bad" if member == "kind" else "warn", "devices", f"the devices differ: {text}",
                          "hosts of one kind: launch --hosts")
            return


def _full(gathered: Gathered) -> Iterator[Finding]:
    for facts, answer in gathered.measured(READY):
        device = answer["device"]
        if device.get("total") and device["free"] < LEAST_DEVICE_SHARE * device["total"]:
            free, total = folding.size(device["free"]), folding.size(device["total"])
            yield Finding("warn", "devices",
                          f"the device of rank {facts['rank']} on {facts['host']} has only {free} of {total} free",
                          "end the processes of earlier runs there (nvidia-smi, rocm-smi, xpu-smi)")


def _cores(gathered: Gathered) -> Iterator[Finding]:
    same: dict[tuple[str, ...], list[str]] = {}
    for host, ranks in gathered.by_host().items():
        if found := _shared_cores(ranks):
            same.setdefault(found, []).append(host)
    for (level, text), names in same.items():
        yield Finding("bad" if level == "bad" else "warn", "cores", f"on {folding.hosts(names)} {text}",
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
        return "warn", (f"{folding.ranks(sharing)} share cores, while cores {core_ranges(tuple(sorted(idle)))} "
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
                short.setdefault((f"only {folding.size(free)} of {name}", instead), []).append(host)
    for (text, instead), names in short.items():
        yield Finding("warn", "room", f"{folding.hosts(names)}: {text} free", instead)


def _clocks(gathered: Gathered) -> Iterator[Finding]:
    for facts in gathered.told:
        offset, within = facts.get("clock", (0.0, 0.0))
        if abs(offset) - within > CLOCK_OFFSET_S:
            yield Finding("warn", "clock", f"the clock of {facts['host']} is {abs(offset):.1f} s "
                                           f"{'ahead of' if offset > 0 else 'behind'} rank 0's",
                          "chrony or ntpd there: times in logs cannot be compared")
