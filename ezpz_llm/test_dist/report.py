"""What test_dist prints, and the plots it keeps."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.dist import Dist
from ezpz_llm.layout.resolve import Resolved
from ezpz_llm.observe import series_plot, wants_colour
from ezpz_llm.observe.history import spread
from ezpz_llm.observe.plots import terminal_width
from ezpz_llm.observe.tables import table
from ezpz_llm.rundir import RunDir, write_atomic
from ezpz_llm.test_dist.reductions import ACROSS, SAME, Reduction
from ezpz_llm.test_dist.task import WIDTHS

LEGEND = """
loss: mean squared error over all ranks' samples; sps: samples a second of all ranks together;
dt: milliseconds of the iteration on rank 0, of which dtf: forward, dtb: backward"""


@dataclass(frozen=True)
class Metric:
    """What is printed under `name`: a member of metrics.jsonl in another unit."""

    name: str
    member: str
    unit: str = ""
    scale: float = 1.0

    def values(self, lines: list[dict[str, Any]]) -> list[float | None]:
        """One value a line, None where the loss is not a number."""
        return [None if line[self.member] is None else line[self.member] * self.scale for line in lines]


_METRICS = (Metric("loss", "loss"), Metric("sps", "samples_per_second"), Metric("dt", "step_time_s", "ms", 1e3),
            Metric("dtf", "forward_s", "ms", 1e3), Metric("dtb", "backward_s", "ms", 1e3))


def description(dist: Dist, resolved: Resolved, environment: dict[str, Any],
                import_seconds: dict[str, float]) -> str:
    """What runs where, before anything does."""
    batch, versions, hosts = resolved.batch, environment["versions"], environment["hosts"]
    shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    rows = [
        ("ranks", f"{dist.world_size} on {len(hosts)} host{'s' * (len(hosts) > 1)} ({shown}), "
                  f"from {dist.info.source}"),
        ("device", f"{dist.device.type}: {environment['device']['name']}, {environment['threads']} threads a rank"),
        ("backend", dist.backend or "none (one rank)"),
        ("layout", f"{resolved.layout.name}, {resolved.precision}"),
        ("batch", f"{batch.global_batch} samples ({batch.micro_batch} a rank x {batch.accumulation} micro-steps x "
                  f"{batch.dp_size} ranks)"),
        ("model", f"MLP {'-'.join(map(str, WIDTHS))}"),
        ("versions", ", ".join(f"{name} {versions[name]}"
                               for name in ("python", "torch", "deepspeed", "mpi4py", "ezpz_llm"))),
        ("imports", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in import_seconds.items())),
        ("run dir", str(dist.run_dir.path)),
        *(("note", note) for note in (*resolved.notes, *dist.info.notes)),
    ]
    return "\n" + "\n".join(f"{name:<10}{text}" for name, text in rows) + "\n"


def reductions(found: list[Reduction]) -> str:
    """A line for each kind of group and size."""
    if not found:
        return "all-reduce: one rank, nothing to test"
    rows = []
    for one in found:
        sums = f"WRONG on ranks {', '.join(map(str, one.wrong_ranks))}" if one.wrong_ranks else "right"
        ranks = "-".join(map(str, one.slowest))
        rows.append((one.kind, str(one.groups), _binary(one.bytes), sums, f"{one.seconds * 1e3:.3f}",
                     f"{one.algorithm_gigabytes_per_second:.2f}", f"{one.bus_gigabytes_per_second:.2f}",
                     f"{ranks}: {one.slowest_bus_gigabytes_per_second:.2f}" if one.groups > 1 else ""))
    kinds = {one.kind for one in found}
    absent = {SAME: "no two ranks share a node", ACROSS: "all ranks are on one node"}
    drawn = table("All-reduce (algorithm GB/s = bytes / time; bus GB/s = 2(n-1)/n times that, for n ranks)",
                  ("between", "groups", "size", "sums", "ms", "algorithm", "bus", "slowest group"), rows)
    return drawn + "".join(f"  {kind}: none, since {why}\n" for kind, why in absent.items() if kind not in kinds)


def _binary(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def iteration(line: dict[str, Any]) -> str:
    """One iteration's line."""
    loss, sps, dt, dtf, dtb = (metric.values([line])[0] for metric in _METRICS)
    return (f"iter={line['step']} loss={'nan' if loss is None else format(loss, '.5f')} sps={sps:.1f} dt={dt:.2f} "
            f"dtf={dtf:.2f} dtb={dtb:.2f}")


def spreads(lines: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median and 10 % and 90 % points of each metric but the loss, without the first and the last iteration."""
    return {metric.name: asdict(spread([value for value in metric.values(lines[1:-1]) if value is not None]))
            for metric in _METRICS if metric.name != "loss"}


def closing(run_dir: RunDir, lines: list[dict[str, Any]], held_out: tuple[float, float], profile: Path | None,
            reasons: list[str]) -> str:
    """Plots, the table of medians, where the files are, and the verdict.

    Args:
        held_out: the loss on the same samples before and after the training.
    """
    width, colour = terminal_width(), wants_colour()
    shown = []
    # The first and the last iteration carry costs of their own, and would take the scale for themselves.
    x = [line["step"] for line in lines[1:-1]]
    for metric in _METRICS:
        y = metric.values(lines[1:-1])
        plain = series_plot(x, y, metric.name, "iter", metric.unit, width)
        write_atomic(run_dir.plots / f"{metric.name}.txt", plain)
        shown.append(series_plot(x, y, metric.name, "iter", metric.unit, width, colour=True) if colour else plain)
    rows = [(name, *(f"{one[point]:.2f}" for point in ("median", "low", "high")))
            for name, one in spreads(lines).items()]
    shown.append(table(f"Iterations 2 to {len(lines) - 1}", ("", "median", "10 %", "90 %"), rows, rich=colour))
    shown += [f"loss      {held_out[0]:.5f} -> {held_out[1]:.5f} (on the same samples before and after)",
              f"profile   {profile}" if profile else "", f"run dir   {run_dir.path}",
              *(f"error: {reason}" for reason in reasons),
              "unhealthy" if reasons else "healthy: the loss fell, and every rank's sums and weights are right"]
    return "\n".join(filter(None, shown))
