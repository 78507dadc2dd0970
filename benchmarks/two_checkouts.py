"""Compare the CPU time of a step with that of another checkout: python3 benchmarks/two_checkouts.py --other FOLDER

Both checkouts train the ladder's small model on the same samples without compilation: the other one with
--other-precision, and this one with each of --precisions. Each run is a separate process (ladder.py). Rounds
alternate between all runs, in rotating order, so that other load on the machine affects all equally. Ratios are of
runs of the same round: tokens per CPU second, divided by those of the other checkout, and by those of the first of
--precisions.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
from pathlib import Path
from typing import Any

import ladder

from ezpz_llm.core.rundir import write_json


def options(precision: str, steps: int) -> list[str]:
    """Return the options of the ladder's top without compilation, in a precision."""
    rung = ladder.Rung("", ("--compile", "false", "--precision", precision), alone=True)
    return ladder.arguments("small", rung, steps)


def tokens_per_cpu_second(run: dict[str, Any]) -> float:
    return run["tokens"] / statistics.median(run["cpu_s"])


def quartiles(rates: list[float], others: list[float]) -> list[float]:
    """Return the quartiles of the ratios of two runs in the same round; the second one is the median."""
    ratios = [rate / other for rate, other in zip(rates, others, strict=True)]
    return statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3


def format_ratio(values: list[float]) -> str:
    """Format a median, with the other quartiles in parentheses."""
    return f"{values[1]:.3f} ({values[0]:.3f} to {values[2]:.3f})"


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
    first = given.precisions[0]
    results = {name: {"tokens_per_cpu_second": rates[name], "median": statistics.median(rates[name]),
                      "ratio_to_other": quartiles(rates[name], rates["other"]),
                      f"ratio_to_{first}": quartiles(rates[name], rates[first])} for name in runs}
    for name, result in results.items():
        print(f"{name}: {result['median']:.0f} tokens per CPU second; ratio to the other checkout "
              f"{format_ratio(result['ratio_to_other'])}, to {first} {format_ratio(result[f'ratio_to_{first}'])}")
    if given.out:
        write_json(given.out, {
            "command": " ".join(["python3", "benchmarks/two_checkouts.py", *sys.argv[1:]]),
            "date": datetime.date.today().isoformat(), "device": environment["device"],
            "threads": environment["threads"], "versions": environment["versions"],
            "options": " ".join(options("PRECISION", given.steps)), "runs": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
