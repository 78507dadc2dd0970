"""How fast a step's tokens are read: python3 benchmarks/data_read.py FOLDER [--block-size T] [--global-batch N]

FOLDER is one that `python3 -m ezpz_llm.data prepare` printed. One process reads whole global batches; prints
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from ezpz_llm.data.samples import Batches
from ezpz_llm.data.shards import TokenData


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    stream = TokenData.open(args.folder).split("train")
    batches = Batches(stream, block_size=args.block_size, seed=1, global_batch=args.global_batch,
                      micro_batch=args.global_batch, dp_rank=0, dp_size=1)
    times = []
    for step in range(args.steps):
        began = time.perf_counter()
        batches.micro_batches(step * args.global_batch)
        times.append(time.perf_counter() - began)
    # The mean holds the calls that compute thousands of starts at once, which the median leaves out.
    mean = statistics.fmean(times)
    print(json.dumps({
        "folder": str(args.folder), "split_tokens": len(stream), "block_size": args.block_size,
        "global_batch": args.global_batch, "steps": args.steps, "step_s_mean": mean,
        "step_s_median": statistics.median(times), "step_s_max": max(times),
        "tokens_per_second": args.global_batch * args.block_size / mean,
    }))


if __name__ == "__main__":
    main()
