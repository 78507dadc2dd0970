"""Tables and bar charts of a diagnosis, for the terminal, the HTML page and figures (imports no torch)."""

from __future__ import annotations

from collections.abc import Mapping

from ezpz_llm.core.base import count_noun
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.observe.tables import Table, percentages, wall_table
from ezpz_llm.training.observe.traffic import call_traffic
from ezpz_llm.verify.explain.diagnosis import Memory
from ezpz_llm.verify.explain.split import CATEGORIES, IN_STEP, Exposed, RankSplit, Split

Bar = tuple[str, dict[str, float]]
"""Name of a stacked bar, and its parts in order."""

CAUSES = "Causes of lost time, by the time you could save (share of the wall time after set-up)"
NO_CAUSE = "no relevant cause"
_SHOWN_RANKS = 16
_NAMES = {"exposed_communication": "exposed communication", "data": "data wait"}
_KINDS = {"copy": "master weights", "secondary": "second copy of parameters (hpZ)",
          "buffers": "communication buffers", "activations": "activations and temporaries"}
_WIRE_COLUMN = 3
"""Index of the column "MB on the wire"."""


def mean_step(split: Split) -> dict[str, float]:
    """Return seconds per traced step by part, averaged over ranks, with exposed communication by kind and group."""
    parts: dict[str, float] = {}
    for name in IN_STEP:
        if name != "exposed_communication":
            parts[_NAMES.get(name, name)] = split.mean(name)
            continue
        parts |= sorted(((f"exposed {label}", sum(exposed.seconds for _, exposed in members) / len(split.ranks))
                         for label, members in split.by_label.items()), key=lambda part: -part[1])
    return {name: seconds / split.ranks[0].steps for name, seconds in parts.items()}


def step_bars(split: Split) -> list[Bar]:
    """Return bars of seconds per traced step: the mean over ranks, then `_shown_ranks`.

    Waiting is a separate part.
    """
    each = [(f"rank {rank.rank} on {rank.host}" if rank.host else f"rank {rank.rank}", _with_waiting(rank))
            for rank in _shown_ranks(split)]
    if len(split.ranks) == 1:
        return each
    all_ranks = [_with_waiting(rank) for rank in split.ranks]
    mean = {name: sum(parts[name] for parts in all_ranks) / len(all_ranks) for name in all_ranks[0]}
    return [("mean over ranks", mean), *each]


def _with_waiting(rank: RankSplit) -> dict[str, float]:
    step = {name: rank.seconds[name] / rank.steps for name in IN_STEP}
    exposed = step.pop("exposed_communication")
    waited = min(rank.waited_s, exposed)
    return {**{_NAMES.get(name, name): seconds for name, seconds in step.items()},
            "exposed, data transfer": exposed - waited, "exposed, waiting": waited}


def collective_bars(split: Split) -> list[Bar]:
    """Return bars of seconds in flight per traced step by kind and group, averaged over ranks; longest first."""
    bars = []
    for label in split.by_label:
        in_flight, exposed, waited = _means(split, label)
        bars.append((label, {"exposed, data transfer": max(0.0, exposed - waited), "exposed, waiting": waited,
                             "hidden by computation": max(0.0, in_flight - exposed)}))
    return sorted(bars, key=lambda bar: -sum(bar[1].values()))


def memory_bars(memory: Memory) -> list[Bar]:
    """Return bars of estimated and measured bytes by kind."""
    both = (("estimate", memory.expected), ("measured", memory.measured))
    return [(name, {_KINDS.get(kind, kind): float(size) for kind, size in sizes.items() if size})
            for name, sizes in both if any(sizes.values())]


def traced_steps_table(split: Split) -> Table:
    """Return the table that breaks down the wall time of traced steps and of the gaps between them."""
    names = [name for name in CATEGORIES if name in IN_STEP or split.mean(name) > 0]
    steps = split.ranks[0].steps
    means = [split.mean(name) for name in names]
    rows = []
    for name, mean, share in zip(names, means, percentages(means), strict=True):
        all_ranks = [rank.seconds[name] / rank.steps * 1e3 for rank in split.ranks]
        rows.append((_NAMES.get(name, name), f"{mean / steps * 1e3:.2f}", f"{min(all_ranks):.2f}",
                     f"{max(all_ranks):.2f}", share))
    wall = sum(rank.window_s for rank in split.ranks) / len(split.ranks) / steps
    return Table(f"Wall time of {steps} traced steps, ms per step",
                 ("", "mean over ranks", "min", "max", "share"), tuple(rows),
                 footer=("wall", f"{wall * 1e3:.2f}", "", "", "100.0 %"))


def collectives_table(split: Split) -> Table:
    """Return the table of a step's collectives by kind and group."""
    rows = []
    for label, members in split.by_label.items():
        rank, exposed = members[0]
        rows.append((label, f"{exposed.count / rank.steps:g}", _megabytes(exposed.bytes, rank.steps),
                     _megabytes(_wire_bytes(split, exposed), rank.steps),
                     *(f"{mean * 1e3:.2f}" for mean in _means(split, label))))
    columns: tuple[str, ...] = ("kind (group)", "count", "MB", "MB on the wire", "in flight", "exposed",
                                "waiting")
    if all(row[_WIRE_COLUMN] == "-" for row in rows):
        columns, *rows = ((*row[:_WIRE_COLUMN], *row[_WIRE_COLUMN + 1:]) for row in (columns, *rows))
    return Table("Collectives per step: count and MB of one rank, times in ms as the mean over ranks", columns,
                 tuple(rows), ("Exposed: in flight while nothing computes. "
                               "Waiting: exposed, and another rank has not entered the collective yet.",))


def _means(split: Split, label: str) -> list[float]:
    """Return seconds per step in flight, exposed and waiting, averaged over ranks."""
    return [sum(getattr(exposed, value) / rank.steps for rank, exposed in split.by_label[label]) / len(split.ranks)
            for value in ("in_flight_s", "seconds", "waited_s")]


def _wire_bytes(split: Split, exposed: Exposed) -> float | None:
    """Return the bytes in the busier direction of a node's link.

    Return None if they are unknown, or if the group lies within one node.
    """
    device = DEVICES.get(split.device)
    if device is None or not exposed.bytes or not exposed.ranks or not split.crosses_nodes(exposed):
        return None
    call = call_traffic(device.collectives, exposed.label.partition(" (")[0], exposed.bytes / exposed.count,
                        len(exposed.ranks))
    return None if call is None else call.bytes * exposed.count


def _megabytes(size: float | None, steps: int) -> str:
    return "-" if size is None else f"{size / steps / 1e6:.3f}"


def _shown_ranks(split: Split) -> list[RankSplit]:
    """Return up to 16 ranks whose steps, minus waiting time, are longest, sorted by rank."""
    return sorted(sorted(split.ranks, key=lambda rank: -rank.own_s)[:_SHOWN_RANKS], key=lambda rank: rank.rank)


def ranks_table(split: Split) -> Table:
    """Return the table of `_shown_ranks`."""
    slowest, chosen = split.straggler, _shown_ranks(split)
    more = len(split.ranks) - len(chosen)
    return Table("Ranks, ms per step", ("rank", "node", "compute", "exposed", "data", "optimizer", "other", "step",
                                        "without waiting", "over median", ""),
                 tuple(_rank_row(rank, rank is slowest, split.median_own_s) for rank in chosen),
                 (f"{count_noun(more, 'faster rank')} not shown",) if more else ())


def _rank_row(rank: RankSplit, is_slowest: bool, median_own_s: float) -> tuple[str, ...]:
    return (str(rank.rank), rank.host, *(f"{seconds * 1e3:.1f}" for seconds in rank.per_step().values()),
            f"{rank.step_s * 1e3:.1f}", f"{rank.own_s * 1e3:.1f}", f"{(rank.own_s - median_own_s) * 1e3:+.1f}",
            "slowest" if is_slowest else "")


def phases_table(phases: Mapping[str, float]) -> Table:
    """Return the table of rank 0's phases, measured without traces."""
    shares = percentages(list(phases.values()))
    return Table("Phases of a step on rank 0, including communication", ("", "ms", "share"), tuple(
        (name, f"{seconds * 1e3:.2f}", share)
        for (name, seconds), share in zip(phases.items(), shares, strict=True)))


def memory_table(memory: Memory) -> Table:
    """Return the table of estimated and measured memory by kind."""
    def show(size: int | None) -> str:
        return "-" if size is None else f"{size / 1e6:,.1f}"

    return Table("Memory in MB, each kind on the rank that uses most of it", ("", "estimate", "measured"), tuple(
        (_KINDS.get(kind, kind), show(memory.expected[kind]), show(size))
        for kind, size in memory.measured.items() if size or memory.expected[kind]),
        footer=("peak", "", show(memory.peak)))


def run_table(wall: Mapping[str, float]) -> Table:
    """Return the table of the run's wall time by activity."""
    return wall_table("Wall time of the run (rank 0)", wall)
