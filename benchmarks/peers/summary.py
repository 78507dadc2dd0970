"""From the runs of all rounds to one line a program."""

from __future__ import annotations

import statistics
from typing import Any

from peers.programs import PROGRAMS, TRAINS_NOT, WORKS
from peers.task import Task

FALLS = 0.5
"""Nats by which the loss has to fall, from that of the first batch to that of the held-out tokens."""
_KEPT = ("options", "rows", "parameters", "flops_per_token", "flops_per_token_causal", "optimizer", "attention",
         "threads", "size")


def spread(values: list[float]) -> dict[str, float]:
    """The median, the least and the greatest."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def summary(program: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds' medians, with the least and the most; times over all steps."""
    first = rounds[0]
    found: dict[str, Any] = {name: first[name] for name in _KEPT if name in first}
    rates = ("flops", "flops_per_cpu_second", "tokens_per_second", "tokens_per_cpu_second")
    found.update({name: spread([one[name] for one in rounds]) for name in rates if name in first})
    if PROGRAMS[program].differs:
        found["differs"] = PROGRAMS[program].differs
    if program in TRAINS_NOT:
        return found
    walls = sorted(wall for one in rounds for wall in one["wall_s"])
    quarter = len(walls) // 4
    found.update(
        step_s=statistics.median(walls), best_s=walls[0], quartiles_s=[walls[quarter], walls[-1 - quarter]],
        steps=len(walls), cpu_s=statistics.median(time for one in rounds for time in one["cpu_s"]),
        peak_bytes=max(one["peak_bytes"] for one in rounds),
        over_start_bytes=max(one["peak_bytes"] - one["start_bytes"] for one in rounds),
        loss_first=first["loss_first"], loss_reached=spread([one["loss_reached"] for one in rounds]),
        val_loss=spread([one["val_loss"] for one in rounds]))
    if "collectives" in first:
        found["collectives"] = {
            "calls": first["collectives"]["calls"],
            "seconds": spread([one["collectives"]["seconds"] for one in rounds]),
            "stubbed_s": spread([statistics.median(one["collectives"]["stubbed_s"]) for one in rounds])}
    found["learns"] = found["val_loss"]["most"] < found["loss_first"] - FALLS
    return found


HEADER = (f"{'program':<24}{'s/step':>9}{'best':>9}{'tok/s':>9}{'tok/CPU-s':>11}{'spread':>15}{'GB':>7}{'loss':>8}"
          f"{'val':>8}")


def line(program: str, found: dict[str, Any]) -> str:
    """One program's line of the table."""
    if "lacks" in found:
        return f"{program:<24}not here: {found['lacks']}"
    if program == "ceiling":
        return (f"{program:<24}{found['flops']['median'] / 1e9:.0f} GFLOP/s, "
                f"{found['flops_per_cpu_second']['median'] / 1e9:.0f} a CPU-second")
    rate = found["tokens_per_cpu_second"]
    if program == "shards":
        return f"{program:<24}{found['tokens_per_second']['median']:,.0f} tok/s, {rate['median']:,.0f} a CPU-second"
    times = f"{found['step_s']:9.3f}{found['best_s']:9.3f}{found['tokens_per_second']['median']:9,.0f}"
    range_ = f"{rate['least']:,.0f}-{rate['most']:,.0f}"
    losses = f"{found['loss_reached']['median']:8.3f}{found['val_loss']['median']:8.3f}"
    return (f"{program:<24}{times}{rate['median']:11,.0f}{range_:>15}{found['peak_bytes'] / 1e9:7.2f}{losses}"
            f"{'' if found['learns'] else '  DOES NOT LEARN'}")


def stated(work: str, task: Task) -> str:
    """The work in words."""
    tokens = "letters" if WORKS[work].letters else "bytes"
    return (f"{work}: {task.n_layer} layers of {task.n_embd}, T {task.block_size}, {task.tokens_per_step} tokens a "
            f"step, V {task.vocab_size}, {tokens} of the standard library's sources; ours in {task.precision}")
