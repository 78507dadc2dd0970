"""Run by three ranks whose device backend communicates nothing: messages, an early end, and a checkpoint.

    launch -n 3 python3 tests/helpers/control_ranks.py
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import torch
import torch.testing._internal.distributed.fake_pg
from one_layer import one_layer

from ezpz_llm.core.base import UserError
from ezpz_llm.training import checkpoint
from ezpz_llm.training.dist import agreement, backends
from ezpz_llm.training.dist.groups import RankGroups
from ezpz_llm.training.dist.setup import Dist, setup
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.trainer.early_end import EarlyEnd
from ezpz_llm.verify.certify.reference import make_engine


def fail(dist: Dist) -> None:
    if dist.rank == 1:
        raise UserError("planted on rank 1")


def main() -> None:
    backends.DEVICES["cpu"] = replace(backends.DEVICES["cpu"], collectives="fake")
    with setup(device="cpu") as dist:
        rank, dist_store = dist.rank, dist.optional.store
        values = [dist.backend, agreement.gather(dist, rank), agreement.all_gather(dist, rank),
                  agreement.all_gather_number(dist, rank + 0.5), agreement.broadcast(dist, rank + 7),
                  agreement.all_reduce(dist, torch.tensor([rank, 1])).tolist(),
                  agreement.first_value(dist, rank if rank > 1 else None)]
        try:
            agreement.run_together(dist, lambda: fail(dist))
        except UserError as error:
            values.append(error.found)
        if rank == 2:
            torch.distributed.new_group([2], backend="fake", use_local_synchronization=True)
        groups = RankGroups(rank, dist.world_size, dist.timeout, dist.control)
        values.append(groups._has_equal_counts())
        early_end = EarlyEnd(dist, os.environ).listen()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        agreed = early_end.agree(1)
        values.append(agreed is not None and agreed.reason)
        resolved = resolve(Request("ddp", world_size=3, global_batch=3, precision="fp32", device="cpu"))
        engine = make_engine(one_layer(), resolved, dist)
        saved = checkpoint.save(engine, dist, dist.run_dir, checkpoint.Progress(step=1))
        values.append(saved.name)
        if rank == 0:
            time.sleep(0.5)
            dist.optional.store.set("rank 0 arrived", "")
        dist.barrier()
        values.append(dist.optional.store.check(["rank 0 arrived"]))
    # A program with its own process group gets a control group, too, and the same one again.
    store = torch.distributed.PrefixStore("own", dist_store)
    torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=3)
    controls = []
    for _ in range(2):
        with setup(device="cpu") as own:
            controls.append(own.control)
            counts = agreement.all_reduce(own, torch.tensor([1, 1])).tolist()
    assert controls[0] is controls[1] is not None
    values.append(counts)
    torch.distributed.destroy_process_group()
    print(values, flush=True)


if __name__ == "__main__":
    main()
