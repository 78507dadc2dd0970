"""Say where the time of a run went, what cost most, and what to try against it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ezpz_llm.base.errors import cleaned, run_command
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.explain.counterfactual import Taken, rerun
from ezpz_llm.explain.diagnosis import Account, account, checks_text, memory_text
from ezpz_llm.explain.split import CATEGORIES, IN_STEP, Exposed, RankSplit, Split
from ezpz_llm.launch.hostlist import fold_numbers
from ezpz_llm.observe.plots import bars_plot, terminal_width, wants_colour
from ezpz_llm.observe.tables import percentages, table, wall_table
from ezpz_llm.observe.traffic import call_traffic
from ezpz_llm.rundir import RunDir, newest_run, read_record


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code.

    Raises:
        UserError: the directory is none of a training run, or a trace cannot be read.
    """
    parser = argparse.ArgumentParser(prog="ezpz-llm explain", description=__doc__, allow_abbrev=False)
    parser.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR",
                        help="the run (default: the newest in runs/)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--counterfactual", action="store_true",
                        help="run a few of its steps again here, some of them without collectives")
    parser.add_argument("--yes", action="store_true", help="start them without asking")
    options = parser.parse_args(argv)
    run_dir = (options.run_dir or newest_run(Path("runs"), "ezpz-llm explain RUN_DIR").path).absolute()
    found = account(run_dir)
    if options.counterfactual:
        again = account(rerun(run_dir, read_record(RunDir(run_dir)), options.yes))
        found = replace(found, counterfactual=again.counterfactual)
    if options.json:
        print(json.dumps(found.as_record(), indent=2))
    else:
        print(account_text(found, terminal_width(), colour=wants_colour()), end="")
    return 0


# An account as a terminal shows it.
_SHOWN_CAUSES = 8
_SHOWN_RANKS = 16
_NAMES = {"exposed_communication": "exposed communication", "data": "data wait"}
_WORTH_SAYING = 0.002
_WIRE = 3
"""The column of bytes on the wire."""


def account_text(account: Account, width: int, *, colour: bool) -> str:
    """Causes first, then what they were found from."""
    parts = [cleaned(f"{account.run_dir}: layout {account.layout}, {account.ranks} rank(s)\n\n{_causes(account)}"),
             _absent(account)]
    if account.split is not None:
        parts += [_bars(account.split, width, colour), _window(account.split, rich=colour),
                  collectives_text(account.split, rich=colour), _ranks(account.split, rich=colour)]
    else:
        parts.append(_phases(account, rich=colour))
    if account.counterfactual:
        parts.append(_counterfactual(account.counterfactual, rich=colour))
    if account.memory:
        parts.append(memory_text(account.memory, rich=colour))
    parts.append(cleaned(checks_text(account.checks)))
    if account.wall:
        parts.append(wall_table("Where the wall time of the run went (rank 0)", account.wall, rich=colour))
    return "\n".join(part for part in parts if part)


def _causes(account: Account) -> str:
    lines = ["What the run lost time to, by what could be had back at most (of its wall time after set-up):"]
    shown = [cause for cause in account.causes if cause.share >= _WORTH_SAYING][:_SHOWN_CAUSES]
    for number, cause in enumerate(shown, 1):
        lines.append(f"  {number}. {cause.share:6.1%}  {cause.seconds:8.2f} s  {cause.what}")
        lines += [f"       try: {line}" for line in cause.advice]
    if not shown:
        lines.append("  nothing that is worth a line")
    if account.split is None:
        lines.append("  Exposed communication and slow ranks show in traces alone: run with --trace-steps 10.")
    return "\n".join(lines) + "\n"


def _absent(account: Account) -> str:
    absent = account.untraced
    return (f"  No trace of rank(s) {fold_numbers(absent)}: means are over the others, and waits for these "
            "are not seen.\n" if absent else "")


def _bars(split: Split, width: int, colour: bool) -> str:
    bars = []
    for name in IN_STEP:
        if name != "exposed_communication":
            bars.append((_NAMES.get(name, name), split.mean(name)))
            continue
        bars += sorted(((f"exposed {label}", sum(one.seconds for _, one in found) / len(split.ranks))
                        for label, found in split.by_label.items()), key=lambda bar: -bar[1])
    steps = split.ranks[0].steps
    return bars_plot([(name, seconds / steps * 1e3) for name, seconds in bars],
                     f"a traced step of the mean rank, ms ({steps} steps)", width, colour=colour)


def _window(split: Split, *, rich: bool) -> str:
    names = [name for name in CATEGORIES if name in IN_STEP or split.mean(name) > 0]
    steps = split.ranks[0].steps
    means = [split.mean(name) for name in names]
    shares = percentages(means)
    rows = []
    for name, mean, share in zip(names, means, shares, strict=True):
        all_ranks = [rank.seconds[name] / rank.steps * 1e3 for rank in split.ranks]
        rows.append([_NAMES.get(name, name), f"{mean / steps * 1e3:.2f}", f"{min(all_ranks):.2f}",
                     f"{max(all_ranks):.2f}", share])
    wall = sum(rank.window_s for rank in split.ranks) / len(split.ranks) / steps
    return table(f"Where the wall time of {steps} traced steps went, ms a step",
                 ("", "mean rank", "least", "most", "share"), rows,
                 footer=("wall", f"{wall * 1e3:.2f}", "", "", "100.0 %"), rich=rich)


def collectives_text(split: Split, *, rich: bool) -> str:
    """The table of a step's collectives; empty without any."""
    rows = []
    for label, found in split.by_label.items():
        means = [sum(getattr(one, value) / rank.steps for rank, one in found) / len(split.ranks)
                 for value in ("in_flight_s", "seconds", "waited_s")]
        rank, one = found[0]
        rows.append([label, f"{one.count / rank.steps:g}", _megabytes(one.bytes, rank.steps),
                     _megabytes(_wire_bytes(split, one), rank.steps),
                     *(f"{mean * 1e3:.2f}" for mean in means)])
    if not rows:
        return ""
    columns = ["kind (group)", "count", "MB", "on the wire", "in flight", "exposed", "of it waiting"]
    if all(row[_WIRE] == "-" for row in rows):
        columns, *rows = ([*row[:_WIRE], *row[_WIRE + 1:]] for row in (columns, *rows))
    return table("Collectives of a step, ms of the mean rank", columns, rows, rich=rich) + (
        "  Exposed: in flight while nothing computes. Waiting: before the last rank had called it, too.\n")


def _wire_bytes(split: Split, one: Exposed) -> float | None:
    """Bytes of the busier direction of a node's link by the traffic table; None if not measured, or none cross."""
    device = DEVICES.get(split.device)
    if device is None or not one.bytes or not one.ranks or not split.crosses_hosts(one):
        return None
    call = call_traffic(device.collectives, one.label.partition(" (")[0], one.bytes / one.count, len(one.ranks))
    return None if call is None else call.bytes * one.count


def _megabytes(size: float | None, steps: int) -> str:
    return "-" if size is None else f"{size / steps / 1e6:.3f}"


def _ranks(split: Split, *, rich: bool) -> str:
    if len(split.ranks) == 1:
        return ""
    slowest = split.straggler
    chosen = sorted(sorted(split.ranks, key=lambda rank: -rank.own_s)[:_SHOWN_RANKS], key=lambda rank: rank.rank)
    rows = [_rank_row(rank, rank is slowest, split.median_own_s) for rank in chosen]
    more = len(split.ranks) - len(chosen)
    return table("Ranks, ms a step", ("rank", "host", "compute", "exposed", "data", "optimizer", "other", "step",
                                      "without waiting", "over median", ""), rows, rich=rich) + (
        f"  ({more} faster ranks are left out.)\n" if more else "")


def _rank_row(rank: RankSplit, is_slowest: bool, median_own_s: float) -> list[str]:
    step = rank.per_step()
    return [str(rank.rank), rank.host, *(f"{seconds * 1e3:.1f}" for seconds in step.values()),
            f"{rank.step_s * 1e3:.1f}", f"{rank.own_s * 1e3:.1f}", f"{(rank.own_s - median_own_s) * 1e3:+.1f}",
            "slowest" if is_slowest else ""]


def _phases(account: Account, *, rich: bool) -> str:
    shares = percentages(list(account.phases.values()))
    rows = [[name, f"{seconds * 1e3:.2f}", share] for (name, seconds), share
            in zip(account.phases.items(), shares, strict=True)]
    return table("Phases of a step on rank 0, communication inside them", ("", "ms", "share"), rows, rich=rich)


def _counterfactual(found: Sequence[Taken], *, rich: bool) -> str:
    rows = [[str(one.rank), f"{one.real_s * 1e3:.1f}", f"{one.stubbed_s * 1e3:.1f}", f"{one.removed_share:.1%}",
             "-" if one.exposed_share is None else f"{one.exposed_share:.1%}"] for one in found]
    return table("Exposed communication, measured by leaving collectives out (median steps, ms)",
                 ("rank", "with", "without", "share that went", "exposed share by traces"), rows, rich=rich)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
