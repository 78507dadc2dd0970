"""Summarize the runs of all rounds as one line per program."""

from __future__ import annotations

import statistics
from typing import Any

from peers.programs import PROGRAMS, TRAINS_NOT, WORKS
from peers.task import Task

FALLS = 0.5
"""Required decrease in nats, from the first batch's loss to the validation loss."""
_KEPT = ("options", "rows", "parameters", "flops_per_token", "flops_per_token_causal", "optimizer", "attention",
         "threads", "size")


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, minimum and maximum."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def summary(program: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians, minima and maxima over the rounds' medians; times are over all steps."""
    first = rounds[0]
    results: dict[str, Any] = {name: first[name] for name in _KEPT if name in first}
    rates = ("flops", "flops_per_cpu_second", "tokens_per_second", "tokens_per_cpu_second")
    results.update({name: spread([run[name] for run in rounds]) for name in rates if name in first})
    if PROGRAMS[program].differs:
        results["differs"] = PROGRAMS[program].differs
    if program in TRAINS_NOT:
        return results
    walls = sorted(wall for run in rounds for wall in run["wall_s"])
    quarter = len(walls) // 4
    results.update(
        step_s=statistics.median(walls), best_s=walls[0], quartiles_s=[walls[quarter], walls[-1 - quarter]],
        steps=len(walls), cpu_s=statistics.median(time for run in rounds for time in run["cpu_s"]),
        peak_bytes=max(run["peak_bytes"] for run in rounds),
        over_start_bytes=max(run["peak_bytes"] - run["start_bytes"] for run in rounds),
        loss_first=first["loss_first"], loss_reached=spread([run["loss_reached"] for run in rounds]),
        val_loss=spread([run["val_loss"] for run in rounds]))
    if "collectives" in first:
        results["collectives"] = {
            "calls": first["collectives"]["calls"],
            "seconds": spread([run["collectives"]["seconds"] for run in rounds]),
            "stubbed_s": spread([statistics.median(run["collectives"]["stubbed_s"]) for run in rounds])}
    results["learns"] = results["val_loss"]["most"] < results["loss_first"] - FALLS
    return results


HEADER = (f"{'program':<24}{'s/step':>9}{'best':>9}{'tok/s':>9}{'tok/CPU-s':>11}{'spread':>15}{'GB':>7}{'loss':>8}"
          f"{'val':>8}")


def line(program: str, found: dict[str, Any]) -> str:
    """Format a program's line of the table."""
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
    """Return a description of the work."""
    tokens = "letters" if WORKS[work].letters else "bytes"
    return (f"{work}: {task.n_layer} layers of {task.n_embd}, T {task.block_size}, {task.tokens_per_step} tokens a "
            f"step, V {task.vocab_size}, {tokens} of the standard library's sources; ours in {task.precision}")
