"""A diagnosis as tables, and as the parts of bars, for the terminal, the page and figures (imports no torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.explain.counterfactual import Taken
from ezpz_llm.explain.diagnosis import Memory
from ezpz_llm.explain.split import CATEGORIES, IN_STEP, Exposed, RankSplit, Split
from ezpz_llm.observe.tables import Table, percentages, wall_table
from ezpz_llm.observe.traffic import call_traffic

Bar = tuple[str, dict[str, float]]
"""A bar's name, and its parts in the order in which they stand."""

CAUSES = "What the run lost time to, by the time you could save (of its wall time after set-up)"
NO_CAUSE = "nothing that is worth a line"
_SHOWN_RANKS = 16
_NAMES = {"exposed_communication": "exposed communication", "data": "data wait"}
_KINDS = {"copy": "master weights", "secondary": "second copy of parameters (hpZ)",
          "buffers": "communication buffers", "activations": "activations and temporaries"}
_WIRE = 3
"""The column of bytes on the wire."""


def mean_step(split: Split) -> dict[str, float]:
    """Seconds a traced step of the mean rank, exposed communication by kind and group."""
    parts: dict[str, float] = {}
    for name in IN_STEP:
        if name != "exposed_communication":
            parts[_NAMES.get(name, name)] = split.mean(name)
            continue
        parts |= sorted(((f"exposed {label}", sum(one.seconds for _, one in found) / len(split.ranks))
                         for label, found in split.by_label.items()), key=lambda part: -part[1])
    return {name: seconds / split.ranks[0].steps for name, seconds in parts.items()}


def step_bars(split: Split) -> list[Bar]:
    """Seconds a traced step of the mean rank, and of the ranks that are shown; waiting for others by itself."""
    each = [(f"rank {rank.rank} on {rank.host}" if rank.host else f"rank {rank.rank}", _with_waiting(rank))
            for rank in shown_ranks(split)]
    if len(split.ranks) == 1:
        return each
    all_ranks = [_with_waiting(rank) for rank in split.ranks]
    mean = {name: sum(one[name] for one in all_ranks) / len(all_ranks) for name in all_ranks[0]}
    return [("mean rank", mean), *each]


def _with_waiting(rank: RankSplit) -> dict[str, float]:
    step = {name: rank.seconds[name] / rank.steps for name in IN_STEP}
    exposed = step.pop("exposed_communication")
    waited = min(rank.waited_s, exposed)
    return {**{_NAMES.get(name, name): seconds for name, seconds in step.items()},
            "exposed, moving data": exposed - waited, "exposed, waiting": waited}


def collective_bars(split: Split) -> list[Bar]:
    """Seconds in flight in a traced step of the mean rank, by kind and group; the longest first."""
    bars = []
    for label in split.by_label:
        in_flight, exposed, waited = _means(split, label)
        bars.append((label, {"exposed, moving data": max(0.0, exposed - waited), "exposed, waiting": waited,
                             "hidden by computation": max(0.0, in_flight - exposed)}))
    return sorted(bars, key=lambda bar: -sum(bar[1].values()))


def memory_bars(memory: Memory) -> list[Bar]:
    """Bytes by what they are for, estimated and measured."""
    both = (("estimate", memory.expected), ("measured", memory.measured))
    return [(name, {_KINDS.get(kind, kind): float(size) for kind, size in sizes.items() if size})
            for name, sizes in both if any(sizes.values())]


def window_table(split: Split) -> Table:
    """The traced steps, and what came between them."""
    names = [name for name in CATEGORIES if name in IN_STEP or split.mean(name) > 0]
    steps = split.ranks[0].steps
    means = [split.mean(name) for name in names]
    rows = []
    for name, mean, share in zip(names, means, percentages(means), strict=True):
        all_ranks = [rank.seconds[name] / rank.steps * 1e3 for rank in split.ranks]
        rows.append((_NAMES.get(name, name), f"{mean / steps * 1e3:.2f}", f"{min(all_ranks):.2f}",
                     f"{max(all_ranks):.2f}", share))
    wall = sum(rank.window_s for rank in split.ranks) / len(split.ranks) / steps
    return Table(f"Where the wall time of {steps} traced steps went, ms a step",
                 ("", "mean rank", "least", "most", "share"), tuple(rows),
                 footer=("wall", f"{wall * 1e3:.2f}", "", "", "100.0 %"))


def collectives_table(split: Split) -> Table:
    """A step's collectives; without rows where there are none."""
    rows = []
    for label, found in split.by_label.items():
        rank, one = found[0]
        rows.append((label, f"{one.count / rank.steps:g}", _megabytes(one.bytes, rank.steps),
                     _megabytes(_wire_bytes(split, one), rank.steps),
                     *(f"{mean * 1e3:.2f}" for mean in _means(split, label))))
    columns: tuple[str, ...] = ("kind (group)", "count", "MB", "on the wire", "in flight", "exposed",
                                "of it waiting")
    if all(row[_WIRE] == "-" for row in rows):
        columns, *rows = ((*row[:_WIRE], *row[_WIRE + 1:]) for row in (columns, *rows))
    return Table("Collectives of a step, ms of the mean rank", columns, tuple(rows), (
        "Exposed: in flight while nothing computes. Waiting: before the last rank had called it, too.",))


def _means(split: Split, label: str) -> list[float]:
    """Seconds a step of the mean rank in flight, exposed, and waiting."""
    return [sum(getattr(one, value) / rank.steps for rank, one in split.by_label[label]) / len(split.ranks)
            for value in ("in_flight_s", "seconds", "waited_s")]


def _wire_bytes(split: Split, one: Exposed) -> float | None:
    """Bytes of the busier direction of a node's link by the traffic table; None if not measured, or none cross."""
    device = DEVICES.get(split.device)
    if device is None or not one.bytes or not one.ranks or not split.crosses_hosts(one):
        return None
    call = call_traffic(device.collectives, one.label.partition(" (")[0], one.bytes / one.count, len(one.ranks))
    return None if call is None else call.bytes * one.count


def _megabytes(size: float | None, steps: int) -> str:
    return "-" if size is None else f"{size / steps / 1e6:.3f}"


def shown_ranks(split: Split) -> list[RankSplit]:
    """The ranks that take longest by themselves, by rank."""
    return sorted(sorted(split.ranks, key=lambda rank: -rank.own_s)[:_SHOWN_RANKS], key=lambda rank: rank.rank)


def ranks_table(split: Split) -> Table:
    """The ranks that take longest by themselves."""
    slowest, chosen = split.straggler, shown_ranks(split)
    more = len(split.ranks) - len(chosen)
    return Table("Ranks, ms a step", ("rank", "host", "compute", "exposed", "data", "optimizer", "other", "step",
                                      "without waiting", "over median", ""),
                 tuple(_rank_row(rank, rank is slowest, split.median_own_s) for rank in chosen),
                 (f"({more} faster ranks are left out.)",) if more else ())


def _rank_row(rank: RankSplit, is_slowest: bool, median_own_s: float) -> tuple[str, ...]:
    return (str(rank.rank), rank.host, *(f"{seconds * 1e3:.1f}" for seconds in rank.per_step().values()),
            f"{rank.step_s * 1e3:.1f}", f"{rank.own_s * 1e3:.1f}", f"{(rank.own_s - median_own_s) * 1e3:+.1f}",
            "slowest" if is_slowest else "")


def phases_table(phases: Mapping[str, float]) -> Table:
    """Rank 0's phases by its own clock."""
    shares = percentages(list(phases.values()))
    return Table("Phases of a step on rank 0, communication inside them", ("", "ms", "share"), tuple(
        (name, f"{seconds * 1e3:.2f}", share)
        for (name, seconds), share in zip(phases.items(), shares, strict=True)))


def counterfactual_table(found: Sequence[Taken]) -> Table:
    """Steps with collectives and without."""
    return Table("Exposed communication, measured by leaving collectives out (median steps, ms)",
                 ("rank", "with", "without", "share that went", "exposed share by traces"), tuple(
        (str(one.rank), f"{one.real_s * 1e3:.1f}", f"{one.stubbed_s * 1e3:.1f}", f"{one.removed_share:.1%}",
         "-" if one.exposed_share is None else f"{one.exposed_share:.1%}") for one in found))


def memory_table(memory: Memory) -> Table:
    """Memory by what it is for."""
    def show(size: int | None) -> str:
        return "-" if size is None else f"{size / 1e6:,.1f}"

    return Table("Memory in MB, each kind on the rank that uses most of it", ("", "estimate", "measured"), tuple(
        (_KINDS.get(kind, kind), show(memory.expected[kind]), show(size))
        for kind, size in memory.measured.items() if size or memory.expected[kind]),
        footer=("peak", "", show(memory.peak)))


def run_table(wall: Mapping[str, float]) -> Table:
    """The whole run's wall time."""
    return wall_table("Where the wall time of the run went (rank 0)", wall)
