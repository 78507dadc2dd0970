"""Measure the time a step waits for samples: python3 benchmarks/data_read.py FOLDER [--cold] [--out FILE.json]

FOLDER is a folder printed by `python3 -m ezpz_llm.data prepare`. One process reads global batches, once on demand
and once with the trainer's thread, which reads a step ahead while the device computes (here: while the process
sleeps). --cold first drops the shards from the page cache, so that samples come from the disk; use shards with
many more tokens than the steps read. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ezpz_llm.core.rundir import write_json
from ezpz_llm.training.data.samples import Batches, ReadAhead
from ezpz_llm.training.data.shards import TokenData


def drop_from_cache(data: TokenData) -> None:
    for shard in data.manifest.splits.train.shards:
        path = data.folder / shard.file
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(batches: Batches, steps: int, compute_s: float) -> dict[str, float]:
    """Return the seconds that a step waits and their share of the step time, without the first step."""
    waits = []
    for step in range(steps + 1):
        began = time.perf_counter()
        batches.micro_batches(step * batches.global_batch)
        waits.append(time.perf_counter() - began)
        time.sleep(compute_s)
    # The mean includes the calls that compute thousands of positions at once; the median does not.
    mean = statistics.fmean(waits[1:])
    return {"wait_s_mean": mean, "wait_s_median": statistics.median(waits[1:]), "wait_s_max": max(waits[1:]),
            "share_of_step": mean / (mean + compute_s) if compute_s else 1.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--block-size", type=int, default=1024)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--compute-ms", type=float, default=100.0, help="compute time of a step")
    parser.add_argument("--cold", action="store_true", help="read from the disk instead of the page cache")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    data = TokenData.open(arguments.folder)
    found: dict[str, Any] = {}
    for name, kind in (("as asked for", Batches), ("a step ahead", ReadAhead)):
        stream = batches = None  # mapped files cannot be dropped from the cache
        if arguments.cold:
            drop_from_cache(data)
        stream = data.split("train")
        batches = kind(stream, block_size=arguments.block_size, seed=1, global_batch=arguments.global_batch,
                       micro_batch=arguments.global_batch, dp_rank=0, dp_size=1)
        found[name] = measure(batches, arguments.steps, arguments.compute_ms / 1e3)
    result = {
        "command": f"python3 benchmarks/data_read.py FOLDER --block-size {arguments.block_size} --global-batch "
                   f"{arguments.global_batch} --steps {arguments.steps} --compute-ms {arguments.compute_ms:g}"
                   f"{' --cold' * arguments.cold}",
        "date": datetime.date.today().isoformat(), "split_tokens": len(stream),
        "versions": {"python": platform.python_version(), "numpy": np.__version__}, **found}
    print(json.dumps(result))
    if arguments.out:
        write_json(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
