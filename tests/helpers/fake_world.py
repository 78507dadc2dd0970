"""Start one rank of a large world at a time, without the other ranks (torch's fake process group).

    python3 tests/helpers/fake_world.py 64,512,4096 zero3 pp2_tp2 zero3,sp4 …      # rank 0
    python3 tests/helpers/fake_world.py --every-rank 16 zero3 pp2_tp2 zero3,sp4 …

Prints one JSON object per line: the layout, the world size, the rank, the ranks in each call of new_group, and the
collectives by kind until the engine is built. Degrees may follow a layout, separated by commas.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training.dist import Degrees, Dist, Mesh
from ezpz_llm.training.engine.build import assemble, build_engine
from ezpz_llm.training.engine.collectives import CollectiveMode
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.init import decay_groups

CPU = torch.device("cpu")
MODEL = get_model_config("tiny-llama", n_layer=4, n_head=8, n_kv_head=8, n_embd=64, block_size=64, vocab_size=256)


class Collectives(CollectiveMode):
    """Counts of collective calls by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def observe(self, name: str, args: tuple[Any, ...]) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1


def start(layout: str, world_size: int, rank: int, folder: Path) -> dict[str, Any]:
    """Create the mesh and the engine of a layout. Return the calls that the rank made."""
    name, *degrees = layout.split(",")
    created: list[list[int]] = []
    usual = torch.distributed.distributed_c10d._new_group_with_tag

    def record(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        created.append(sorted(range(world_size) if ranks is None else ranks))
        return usual(ranks, *args, **kwargs)

    torch.distributed.distributed_c10d._new_group_with_tag = record
    with Collectives() as collectives:
        mesh = Mesh(Degrees(world_size), rank)
        dist = Dist(RankInfo(rank, world_size, rank % 8, 8, rank // 8, "test"), CPU, "gloo", mesh, RunDir(folder))
        resolved = resolve(Request(name, world_size=world_size, clip=1.0, global_batch=8 * world_size, model=MODEL,
                                   precision="fp32", device="cpu",
                                   **{degree[:2]: int(degree[2:]) for degree in degrees}))
        chosen = resolved.layout
        dist.arrange(tp=chosen.tp, pp=chosen.pp, sp=chosen.sp)
        model = assemble(MODEL, chosen, dist.mesh, 1)
        build_engine(model, resolved, dist, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                     param_groups=decay_groups(model, 0.1))
    torch.distributed.distributed_c10d._new_group_with_tag = usual
    return {"layout": layout, "world_size": world_size, "rank": rank, "groups": created,
            "collectives": collectives.calls}


def main(sizes: str, *layouts: str, every_rank: bool) -> None:
    for world_size, rank in ((size, rank) for size in map(int, sizes.split(","))
                             for rank in range(size if every_rank else 1)):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank % 8), LOCAL_SIZE="8",
                          MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        with tempfile.TemporaryDirectory() as folder:
            for layout in layouts:
                print(json.dumps(start(layout, world_size, rank, Path(folder))))
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*(word for word in sys.argv[1:] if word != "--every-rank"), every_rank="--every-rank" in sys.argv)
