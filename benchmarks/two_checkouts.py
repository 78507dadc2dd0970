"""Compare the CPU time of a step with that of another checkout: python3 benchmarks/two_checkouts.py --other FOLDER

Both checkouts train the ladder's small model on the same samples without compilation: the other one with
--other-precision, and this one with each of --precisions. Each run is a separate process (ladder.py). Rounds
alternate between all runs, in rotating order, so that other load on the machine affects all equally. Ratios are of
runs of the same round: tokens per CPU second of this checkout, divided by the other's.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
from pathlib import Path
from typing import Any

import ladder

from ezpz_llm.rundir import write_json


def options(precision: str, steps: int) -> list[str]:
    """Return the options of the ladder's top without compilation, in a precision."""
    rung = ladder.Rung("", ("--compile", "false", "--precision", precision), alone=True)
    return ladder.arguments("small", rung, steps)


def tokens_per_cpu_second(run: dict[str, Any]) -> float:
    return run["tokens"] / statistics.median(run["cpu_s"])


def summary(rates: list[float], others: list[float]) -> dict[str, Any]:
    """Return all rates in tokens per CPU second, their median, and the median and quartiles of the ratios."""
    ratios = [one / other for one, other in zip(rates, others, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"tokens_per_cpu_second": rates, "median": statistics.median(rates), "ratio": quartiles[1],
            "ratio_quartiles": [quartiles[0], quartiles[2]]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, required=True, help="the other checkout")
    parser.add_argument("--other-precision", default="bf16_autocast")
    parser.add_argument("--precisions", nargs="+", default=["bf16_autocast", "bf16"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    runs = {"other": (given.other.resolve() / "benchmarks" / "ladder.py", given.other_precision),
            **{precision: (Path(ladder.__file__), precision) for precision in given.precisions}}
    rates: dict[str, list[float]] = {name: [] for name in runs}
    environment: Any = None
    for number in range(given.rounds):
        names = [*runs][number % len(runs):] + [*runs][:number % len(runs)]
        for name in names:
            program, precision = runs[name]
            run = ladder.in_a_process(options(precision, given.steps), program)
            environment = run["environment"] if name != "other" else environment
            rates[name].append(tokens_per_cpu_second(run))
        print(f"round {number + 1}: " + ", ".join(f"{name} {rates[name][-1]:.0f}" for name in runs), flush=True)
    found = {name: summary(rates[name], rates["other"]) for name in runs}
    for name, one in found.items():
        low, high = one["ratio_quartiles"]
        print(f"{name}: {one['median']:.0f} tokens per CPU second, {one['ratio']:.3f} of the other checkout's "
              f"({low:.3f} to {high:.3f})")
    if given.out:
        write_json(given.out, {
            "command": " ".join(["python3", "benchmarks/two_checkouts.py", *sys.argv[1:]]),
            "date": datetime.date.today().isoformat(), "device": environment["device"],
            "threads": environment["threads"], "versions": environment["versions"],
            "options": " ".join(options("PRECISION", given.steps)), "runs": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
