"""Run by four ranks: all-reduce along the axes of several meshes, while only some ranks are in certain groups.

    mpiexec -n 4 python3 tests/helpers/group_ranks.py FILE

Rank 0 writes the sums of the ranks' numbers to FILE, by mesh, axis and rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import gather
from ezpz_llm.training.dist.setup import setup

ARRANGEMENTS = ({"tp": 2}, {"pp": 2}, {}, {"tp": 2}, {"pp": 4}, {"pp": 2})


def group_sums(dist: Dist) -> dict[str, float]:
    """Sum the ranks' numbers within each group of two ranks."""
    mesh = dist.mesh
    groups = {"tp": mesh.group("tp"), "pp": mesh.group("pp"), "dp": mesh.group("dp")}
    if mesh.pp_size == 4:
        groups["ends"] = mesh.end_stages_group()
    if mesh.pp_size == 2:
        groups["sends"] = mesh.separate_group("pp")
    sums = {}
    for name, group in groups.items():
        if group is not None:
            value = torch.tensor(10.0 ** dist.rank)
            torch.distributed.all_reduce(value, group=group)
            sums[name] = value.item()
    return sums


def main(path: str) -> None:
    with setup(device="cpu", run_dir=Path(path).parent, timeout_s=300) as dist:
        sums = []
        for number, degrees in enumerate(ARRANGEMENTS):
            dist.arrange(**degrees)
            sums.append(group_sums(dist))
            if number == 0:
                torch.distributed.new_group([0, 1])  # only ranks 0 and 1 advance their group counter
        values = gather(dist, sums)
        if values is not None:
            Path(path).write_text(json.dumps(values))


if __name__ == "__main__":
    main(sys.argv[1])
