"""Run nanoGPT's CPU example under layouts: python3 benchmarks/yardstick.py TINYSHAKESPEARE.txt [--out FILE.json]

Trains the preset shakespeare-char-cpu (2000 steps, fp32) in one process, then on two ranks under ddp, zero1, zero2
and zero3, on the same samples in the same order. Each run ends with the loss on the whole validation split of
111,540 characters. Exit code 0 only if the single process reaches 1.92 and the other runs are within 0.005 of it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ezpz_llm.core.rundir import RunDir, write_json
from ezpz_llm.core.rundir.records import read_record

BAR = 1.92
WITHIN = 0.005
RUNS = (("ddp", 1), ("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2))
TIMEOUT_S = 1500


def train(text: Path, layout: str, ranks: int, run_dir: Path) -> dict[str, Any]:
    """Run training through launch, and return its results."""
    began = time.monotonic()
    done = subprocess.run(
        ["launch", "-n", str(ranks), "--run-dir", str(run_dir), "python3", "-m", "ezpz_llm.train", "--preset",
         "shakespeare-char-cpu", "--corpus", str(text), "--ds-config", layout, "--sample-tokens", "0"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{layout} on {ranks} ranks ended with exit code {done.returncode}: see {run_dir}")
    record = read_record(RunDir(run_dir))
    return {"layout": layout, "ranks": ranks, "val_loss": record.val_loss, "val_tokens": record.val_tokens,
            "sample_hash": record.sample_hash, "wall_s": round(time.monotonic() - began, 1),
            "versions": record.environment.versions, "processor": record.environment.device.name}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="tiny Shakespeare, 1,115,394 bytes")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for layout, ranks in RUNS:
            results.append(train(arguments.text.resolve(), layout, ranks, Path(folder) / f"{layout}-{ranks}"))
            print(f"{layout:<6} on {ranks}: {results[-1]['val_loss']:.4f} in {results[-1]['wall_s']} s", flush=True)
    single = results[0]["val_loss"]
    farthest = max(abs(result["val_loss"] - single) for result in results)
    same_samples = len({result["sample_hash"] for result in results}) == 1
    passed = single <= BAR and farthest <= WITHIN and same_samples
    if arguments.out:
        versions, processor = results[0]["versions"], results[0]["processor"]
        runs = [{key: value for key, value in result.items() if key not in ("versions", "processor")}
                for result in results]
        write_json(arguments.out, {
            "command": f"python3 benchmarks/yardstick.py tinyshakespeare.txt --out {arguments.out}",
            "date": datetime.date.today().isoformat(), "processor": processor, "versions": versions, "bar": BAR,
            "within": WITHIN, "farthest": farthest, "same_samples": same_samples, "passed": passed, "runs": runs})
    print(f"single process {single:.4f} (bar {BAR}), farthest layout {farthest:.5f} away (bar {WITHIN}), "
          f"same samples: {same_samples}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
