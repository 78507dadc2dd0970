"""Rank that issues collectives and counts bytes on its node's link: traffic_ranks.py CASES.json OUT.json

Started with torch's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), one rank per node. CASES is a list of
[kind, ranks, bytes, repeats]; the first `ranks` ranks take part, the others wait. For each case, rank 0 writes the
bytes that every rank sent and received per call, and the seconds from the last rank's call until all ranks are done
(simulated nodes share one clock). Bytes are the minimum of three rounds, since TCP retransmissions on a busy
machine only add. Seconds are the median over calls: where two ranks that send to each other take turns on some
calls and not on others, the fastest call is rare.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

LINK = "eth0"
ROUNDS = 3


def counters() -> tuple[int, int]:
    """Return the bytes that the link has sent and received so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == LINK:
            fields = [int(number) for number in numbers.split()]
            return fields[8], fields[0]
    raise SystemExit(f"network link {LINK} does not exist")


def operation(kind: str, size: int, ranks: int, group: dist.ProcessGroup):
    """Return a function that issues one collective with a full buffer of `size` bytes, as certify counts them."""
    me, elements = dist.get_rank(), size // 4
    whole, share = torch.ones(elements), torch.ones(elements // ranks)
    shares = [torch.ones(elements // ranks) for _ in range(ranks)]
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, share, group=group),
        "all_gather_list": lambda: dist.all_gather(shares, share, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(share, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "reduce": lambda: dist.reduce(whole, 0, group=group),
        "gather": lambda: dist.gather(share, shares if me == 0 else None, 0, group=group),
        "scatter": lambda: dist.scatter(share, shares if me == 0 else None, 0, group=group),
        "send": lambda: dist.send(whole, 1, group=group) if me == 0 else dist.recv(whole, 0, group=group),
        "nothing": lambda: None,
    }[kind]


def measure(kind: str, ranks: int, size: int, repeats: int, group: dist.ProcessGroup) -> list[list[float]]:
    """Return for every rank the bytes sent and received per call, and each call's start and end.

    The bytes of the surrounding barriers are subtracted.
    """
    def count(act) -> tuple[list[int], list[float]]:
        rounds, moments = [], []
        for _ in range(ROUNDS):
            dist.barrier(group=group)
            before = counters()
            for _ in range(repeats):
                dist.barrier(group=group)
                began = time.monotonic()
                act()
                moments += [began, time.monotonic()]
            dist.barrier(group=group)
            rounds.append([after - start for after, start in zip(counters(), before, strict=True)])
        return [min(numbers) for numbers in zip(*rounds, strict=True)], moments

    act = operation(kind, size, ranks, group)
    act()  # the first call opens connections
    idle, _ = count(lambda: None)
    busy, moments = count(act)
    each = [(after - before) / repeats for after, before in zip(busy, idle, strict=True)]
    own = torch.tensor([*each, *moments], dtype=torch.float64)
    rows = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(rows, own, group=group)
    return [row.tolist() for row in rows]


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in sorted({case[1] for case in cases})}
    results = []
    for kind, ranks, size, repeats in cases:
        if dist.get_rank() < ranks:
            rows = measure(kind, ranks, size, repeats, groups[ranks])
            began, over = ([max(moments) for moments in zip(*(row[first::2] for row in rows), strict=True)]
                           for first in (2, 3))
            results.append({"kind": kind, "ranks": ranks, "bytes": size,
                            "sent": [round(row[0]) for row in rows], "received": [round(row[1]) for row in rows],
                            "seconds": statistics.median(end - start for start, end in
                                                         zip(began, over, strict=True))})
        dist.barrier()
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
