"""Run the default job under every layout: python3 benchmarks/default_job.py [--steps K] [--out FILE.json]

Runs `launch -n N python3 -m ezpz_llm.train --ds-config NAME` for each of ds_configs/, on the minimum number of
ranks, at least two, with a global batch of eight sequences. Exit code 0 only if every run succeeds, learns (its
validation loss is below the unigram entropy of the corpus, which a model reaches by counting symbols) and writes
the same plots. It does not compare losses: in bf16 and at this learning rate, rounding in a different order makes
runs diverge. certify checks that the layouts are equivalent.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ezpz_llm.core.rundir import RunDir, write_json
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.training.layout import ds_config
from ezpz_llm.verify.certify.cases import natural_worlds

TIMEOUT_S = 1200


def train(layout: str, steps: int, run_dir: Path) -> dict[str, Any]:
    """Run training through launch, and return its results."""
    ranks = next(world for world in natural_worlds(layout) if world > 1)
    done = subprocess.run(
        ["launch", "-n", str(ranks), "--run-dir", str(run_dir), "python3", "-m", "ezpz_llm.train", "--ds-config",
         layout, "--global-batch-size", "8", "--steps", str(steps)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{layout} on {ranks} ranks ended with exit code {done.returncode}: see {run_dir}")
    record = read_record(RunDir(run_dir))
    median_s = record.summary.step_time.median
    return {"layout": layout, "ranks": ranks, "val_loss": record.val_loss,
            "unigram_entropy": record.unigram_entropy, "step_ms": round(1000 * median_s, 1),
            "plots": sorted(path.name for path in RunDir(run_dir).plots.iterdir()),
            "versions": record.environment.versions, "processor": record.environment.device.name}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for layout in ds_config.names():
            results.append(train(layout, arguments.steps, Path(folder) / layout))
            one = results[-1]
            print(f"{layout:<24} {one['ranks']} ranks: validation loss {one['val_loss']:.4f}, "
                  f"{one['step_ms']:.0f} ms a step", flush=True)
    ddp = next(one["val_loss"] for one in results if one["layout"] == "ddp")
    farthest = max(abs(one["val_loss"] - ddp) for one in results)
    learnt = all(one["val_loss"] < one["unigram_entropy"] for one in results)
    drawn = all(one["plots"] == results[0]["plots"] and one["plots"] for one in results)
    passed = learnt and drawn
    if arguments.out:
        versions, processor = results[0]["versions"], results[0]["processor"]
        runs = [{key: value for key, value in one.items() if key not in ("versions", "processor", "plots")}
                for one in results]
        write_json(arguments.out, {
            "command": f"python3 benchmarks/default_job.py --steps {arguments.steps} --out {arguments.out}",
            "date": datetime.date.today().isoformat(), "processor": processor, "versions": versions,
            "steps": arguments.steps, "farthest_from_ddp": farthest, "plots": results[0]["plots"],
            "passed": passed, "runs": runs})
    print(f"all learnt: {learnt}, plots: {drawn}, farthest from ddp: {farthest:.4f}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
