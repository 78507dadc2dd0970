"""Points of a study with their efficiency: what the runs of each come to, against the smallest of the same kind."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ezpz_llm.observe.history import Spread, finite, spread
from ezpz_llm.scaling.confidence import Estimate, estimate, ratio
from ezpz_llm.scaling.sample import SPLIT, Mode, Repeat

Unit = Literal["nodes", "ranks"]

DISAGREEING = 1.3
"""Runs of a point that differ by more are not runs of the same thing."""


@dataclass(frozen=True)
class Measured:
    """All repeats of one point; `good` has those that finished, in the order of their numbers."""

    repeats: tuple[Repeat, ...]

    @property
    def first(self) -> Repeat:
        """A repeat to ask for what all have in common."""
        return (self.good or self.repeats)[0]

    @property
    def good(self) -> tuple[Repeat, ...]:
        return tuple(one for one in self.repeats if one.error is None and one.step_times_s)

    @property
    def name(self) -> str:
        return self.first.point

    @property
    def mode(self) -> Mode:
        return self.first.mode

    @property
    def ds_config(self) -> str:
        return self.first.ds_config

    @property
    def nodes(self) -> int:
        return self.first.nodes

    @property
    def ranks(self) -> int:
        return self.first.ranks

    @property
    def errors(self) -> tuple[str, ...]:
        """Why repeats failed, each reason once."""
        said = [one.error or "no steady step was measured" for one in self.repeats if one not in self.good]
        return tuple(dict.fromkeys(said))

    @property
    def step_time(self) -> Estimate:
        """Seconds of a step: the geometric mean of the runs' medians. Only of a point with a good repeat."""
        return estimate([one.step_times_s for one in self.good])

    @property
    def steps(self) -> Spread:
        """All steady steps of all runs in seconds: median, and what a tenth lies below and above."""
        return spread([seconds for one in self.good for seconds in one.step_times_s])

    @property
    def disagreement(self) -> float:
        """The slowest run's median step over the fastest one's."""
        medians = [statistics.median(one.step_times_s) for one in self.good]
        return max(medians) / min(medians)

    @property
    def tokens_per_second(self) -> float:
        return self.first.step_tokens / self.step_time.value

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens_per_second / self.ranks

    @property
    def mfu(self) -> float | None:
        """The median over runs, as a fraction."""
        known = [one.mfu for one in self.good if one.mfu is not None]
        return statistics.median(known) if known else None

    @property
    def peak_device_bytes(self) -> int | None:
        return max((one.peak_device_bytes for one in self.good if one.peak_device_bytes), default=None)

    @property
    def peak_host_bytes(self) -> int | None:
        return max((one.peak_host_bytes for one in self.good if one.peak_host_bytes), default=None)

    @property
    def split(self) -> dict[str, float] | None:
        """Seconds a step under the keys SPLIT, the mean over the runs that were traced."""
        known = [one.split for one in self.good if one.split]
        return {key: statistics.fmean(one[key] for one in known) for key in SPLIT} if known else None

    @property
    def slowest(self) -> tuple[int | None, str | None, int]:
        """Rank and host that were the slowest in most runs, and in how many; ties go to the earlier run."""
        (rank, host), times = Counter((one.slowest_rank, one.slowest_host) for one in self.good).most_common(1)[0]
        return rank, host, times

    @property
    def learnt(self) -> bool:
        """True if the loss fell in every run: the speed of one where it did not says nothing."""
        return all(finite(one.first_loss) and finite(one.last_loss) and one.last_loss < one.first_loss
                   for one in self.good)


@dataclass(frozen=True)
class Curve:
    """The points of one mode and layout that have a number, from the smallest on (at least one)."""

    mode: Mode
    ds_config: str
    points: tuple[Measured, ...]

    @property
    def base(self) -> Measured:
        return self.points[0]

    @property
    def name(self) -> str:
        return f"{self.mode} {self.ds_config}"

    @property
    def unit(self) -> Unit:
        """Unit of the sizes: nodes, if there are several and all have equally many ranks."""
        per_node = {point.ranks / point.nodes for point in self.points}
        return "nodes" if len(per_node) == 1 and self.points[-1].nodes > 1 else "ranks"

    def size(self, point: Measured) -> int:
        """The point's size in the curve's unit."""
        return point.nodes if self.unit == "nodes" else point.ranks

    def efficiency(self, point: Measured) -> Estimate:
        """Tokens a second and device over the smallest point's. Under strong scaling that is the speed-up over the
        ratio of ranks; under weak scaling the ratio of step times. The smallest point's own is 1 by definition."""
        if point is self.base:
            return Estimate(0.0, 0.0, 0, "none")
        work = point.first.step_tokens / point.ranks * self.base.ranks / self.base.first.step_tokens
        return ratio(self.base.step_time, point.step_time, work)

    def speed_up(self, point: Measured) -> float:
        """Tokens a second over the smallest point's."""
        return point.tokens_per_second / self.base.tokens_per_second

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes where the curve is less than its name says."""
        found = []
        per_rank = {point.first.step_tokens * self.base.ranks / point.ranks for point in self.points}
        batches = {point.first.step_tokens for point in self.points}
        if self.mode == "weak" and len(per_rank) > 1:
            found.append("not weak scaling: the tokens of a step and device differ between its points")
        if self.mode == "strong" and len(batches) > 1:
            found.append("not strong scaling: the tokens of a step differ between its points")
        found += [f"{point.name}: the loss did not fall, so its speed says nothing"
                  for point in self.points if not point.learnt]
        found += [f"{point.name}: its slowest run took {point.disagreement:.1f} times as long as its fastest: "
                  "something else was at work there; look at its runs, and measure the point again"
                  for point in self.points if point.disagreement > DISAGREEING]
        found += [f"{point.name}: {len(point.repeats) - len(point.good)} of {len(point.repeats)} runs failed"
                  for point in self.points if len(point.good) < len(point.repeats)]
        return tuple(found)


def points_of(repeats: Iterable[Repeat]) -> list[Measured]:
    """The points, by mode, layout and size."""
    groups: dict[str, list[Repeat]] = {}
    for one in repeats:
        groups.setdefault(one.point, []).append(one)
    points = [Measured(tuple(sorted(group, key=lambda one: one.repeat))) for group in groups.values()]
    order = {name: i for i, name in enumerate(dict.fromkeys(point.ds_config for point in points))}
    return sorted(points, key=lambda one: (one.mode != "weak", order[one.ds_config], one.ranks, one.nodes))


def curves_of(points: Sequence[Measured]) -> list[Curve]:
    """A curve for each mode and layout that has a point with a number."""
    groups: dict[tuple[Mode, str], list[Measured]] = {}
    for point in points:
        if point.good:
            groups.setdefault((point.mode, point.ds_config), []).append(point)
    return [Curve(mode, ds_config, tuple(group)) for (mode, ds_config), group in groups.items()]
