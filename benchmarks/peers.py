"""Compare our trainer with other programs: python3 benchmarks/peers.py --work NAME [--peer NAME=FOLDER ...]

Works are cpu-50304, cpu-65, ddp, zero and memory. Each has a shape, a batch and a list of programs
(peers/programs.py). Peers are Hugging Face's Trainer, if installed; a plain loop, defined here; and nanoGPT,
build-nanogpt and picotron, each from a checkout given with --peer and run with its own loop. Ours is the trainer's
loop.

Each run has its own processes. Rounds alternate between all programs, so that other load on the machine affects
all equally, and ratios compare runs of the same round. The first 3 steps of each run are not measured. All
programs read the same tokens and end with the loss on the same validation tokens; the benchmark fails if a program
does not learn by that loss. Tokens per CPU second include user and system time of all ranks. Ours uses the
machine's native precision, bf16 or fp32, which is printed. Memory is the peak of a program's processes until its
last step. "ceiling" is the measured matmul peak of this machine in our precision, in each round; "shards" only
reads samples.

The bound for ZeRO is ddp's step without its collectives, plus the layout's collectives run sequentially without
overlap. A ratio above 1 means that some collectives overlapped with computation, or that the sharded optimizer
saved more time than they cost.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers.bars import bar_line, bars
from peers.data import make_data
from peers.machine import machine, state_of
from peers.measure import Bench, run_program
from peers.programs import PROGRAMS, TRAINS_NOT, WORKS
from peers.summary import HEADER, line, stated, summary
from peers.task import SKIP

from ezpz_llm.core.rundir import write_json

EACH = ("load_before", "step_s", "tokens_per_second", "tokens_per_cpu_second", "peak_bytes", "val_loss")
"""Results of a run that are written to --out."""
MAINS = {"nanogpt": "train.py", "build-nanogpt": "train_gpt2.py", "picotron": "train.py"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=FOLDER",
                        help=f"a checkout of {', '.join(MAINS)}")
    parser.add_argument("--programs", help=f"comma-separated, of {', '.join(PROGRAMS)} (the work's programs)")
    parser.add_argument("--steps", type=int, help="steps of each run")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--global-batch-size", type=int, help="sequences per step (the work's)")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    work = WORKS[given.work]
    given.steps = work.steps if given.steps is None else given.steps
    given.rounds = work.rounds if given.rounds is None else given.rounds
    if given.steps < SKIP + 3:
        parser.error(f"--steps {given.steps}: must be at least {SKIP + 3}, since the first {SKIP} are not measured")
    given.programs = given.programs.split(",") if given.programs else list(work.programs)
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: must be at least 1")
    for name in given.programs:
        if name not in PROGRAMS:
            parser.error(f"--programs {name}: unknown program")
    if given.out and not Path(given.out).absolute().parent.is_dir():
        parser.error(f"--out {given.out}: no such folder")
    given.peers = {}
    for pair in given.peer:
        name, _, folder = pair.partition("=")
        if name not in MAINS or not (Path(folder) / MAINS[name]).is_file():
            parser.error(f"--peer {pair}: NAME is one of {', '.join(MAINS)}, FOLDER a checkout of it")
        given.peers[name] = Path(folder).resolve()
    return given


def main() -> int:
    given = arguments()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        changes = {"global_batch": given.global_batch_size} if given.global_batch_size else {}
        bench = Bench(WORKS[given.work], Path(folder), given.peers, given.steps, changes)
        make_data(bench.folder / "data", bench.work.letters)
        lacks = {name: why for name in given.programs if (why := bench.lacks(name))}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in given.programs if name not in lacks}
        words = stated(given.work, bench.task("ours", bench.folder))
        print(words, flush=True)
        for number in range(1, given.rounds + 1):
            for name, found in runs.items():
                found.append(run_program(bench, name))
                took = "" if name in TRAINS_NOT else f": {found[-1]['step_s'] * 1e3:.0f} ms a step"
                print(f"round {number}, {name}{took}", flush=True)
            table = {**{name: {"lacks": why} for name, why in lacks.items()},
                     **{name: summary(name, found) for name, found in runs.items()}}
            rows = bars(given.work, runs)
            learns = all(found.get("learns", True) for found in table.values())
            if given.out:  # after each round, to keep the results if a later round fails
                write_json(given.out, {
                    "command": " ".join(["python3", "benchmarks/peers.py", *sys.argv[1:]]), "work": words,
                    "date": datetime.date.today().isoformat(), "machine": machine(),
                    "peers": {name: state_of(folder, MAINS[name]) for name, folder in given.peers.items()},
                    "steps": given.steps, "left_out": SKIP, "rounds": number, "load_before": load,
                    "load_after": os.getloadavg(), "learns": learns, "bars": rows, "programs": table,
                    "runs": {name: [{key: one[key] for key in EACH if key in one} for one in found]
                             for name, found in runs.items()}})
    print(f"\n{HEADER}", *(line(name, table[name]) for name in given.programs), "", *map(bar_line, rows), sep="\n")
    return 0 if learns else 1


if __name__ == "__main__":
    sys.exit(main())
