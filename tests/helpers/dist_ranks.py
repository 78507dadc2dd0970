"""Run by several ranks: call `setup`, report its result, and fail on a chosen rank.

    mpiexec -n 4 python3 tests/helpers/dist_ranks.py '{"device": "cpu", "tp": 2}'

The argument holds the arguments of `setup`. `device_of_rank` overrides the device on one rank, and `fail` names a
rank that raises an exception inside. Each rank writes rankN.json into the run directory.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ezpz_llm.core.base.errors import run_command


def main(argv: list[str]) -> int:
    from ezpz_llm.launcher.basics.ranks import find_rank
    from ezpz_llm.training.dist.agreement import all_gather_number
    from ezpz_llm.training.dist.setup import setup

    wanted = json.loads(argv[0])
    own = wanted.pop("device_of_rank", {}).get(str(find_rank(os.environ).rank))
    failing, tp = wanted.pop("fail", None), wanted.pop("tp", 1)
    if "run_dir" in wanted:
        wanted["run_dir"] = Path(wanted["run_dir"])
    before = dict(os.environ)
    with setup(**{**wanted, **({"device": own} if own else {})}) as dist:
        if dist.rank == failing:
            raise ValueError("planted")
        import torch

        dist.arrange(tp=tp)
        mesh, sums = dist.mesh, {}
        for axis in ("dp", "tp"):
            value = torch.tensor(10.0 ** dist.rank)
            torch.distributed.all_reduce(value, group=mesh.group(axis))
            sums[axis] = value.item()
        dist.barrier()
        report = {"rank": dist.rank, "world_size": dist.world_size, "local_rank": dist.info.local_rank,
                  "source": dist.info.source, "backend": dist.backend, "device": str(dist.device),
                  "run_dir": str(dist.run_dir.path), "sums": sums, "place": [mesh.dp_rank, mesh.tp_rank],
                  "numbers": all_gather_number(dist, dist.rank + 0.5),
                  "exported": {name: os.environ.get(name) for name in
                               ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")}}
    report |= {"mpi4py": "mpi4py" in sys.modules, "environment_as_before": dict(os.environ) == before}
    (dist.run_dir.path / f"rank{dist.rank}.json").write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
