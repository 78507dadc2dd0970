"""Run a module or script with a planted fault, which the suite for several ranks must find.

    python3 tests/gpu/several/faulty_rank.py FAULT -m ezpz_llm.train …
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as torch_dist
from running import run_program


def _is_last() -> bool:
    return os.environ.get("EZPZ_LLM_RANK") == str(int(os.environ["EZPZ_LLM_WORLD_SIZE"]) - 1)


def wrong_values() -> None:
    """Make all-reduces of more than a few elements wrong by a thousandth on the last rank."""
    all_reduce = torch_dist.all_reduce

    def wrong(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = all_reduce(tensor, *args, **kwargs)
        if work is not None:
            work.wait()
        if _is_last() and tensor.is_floating_point() and tensor.numel() > 8:
            tensor.mul_(1.001)
        return work

    torch_dist.all_reduce = wrong


def skipped_collective() -> None:
    """Make the last rank skip one of its all-reduces on the device."""
    all_reduce, calls = torch_dist.all_reduce, [0]

    def skipping(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls[0] += tensor.numel() > 8
        if _is_last() and calls[0] == 20 and tensor.numel() > 8:
            calls[0] += 1
            return None
        return all_reduce(tensor, *args, **kwargs)

    torch_dist.all_reduce = skipping


def stale_checkpoint() -> None:
    """Make every background checkpoint contain the values of the first one."""
    from ezpz_llm.training.checkpoint.cpu_copy import CpuMemory

    copy, first = CpuMemory.copy, []

    def stale(self: Any, shard: Any) -> Any:
        copied = copy(self, shard)
        values = list(copied.tensors)
        first.append([value.clone() for value in values])
        return replace(copied, tensors=iter(first[0]))

    CpuMemory.copy = stale  # type: ignore[method-assign]


def wrong_send_order() -> None:
    """Make pipeline stages send the activations of the micro-batch before."""
    from deepspeed.runtime.pipe import p2p

    send, before = p2p.send, {}

    def late(tensor: torch.Tensor, dest_stage: int) -> Any:
        if not tensor.is_floating_point() or tensor.numel() < 64:
            return send(tensor, dest_stage)  # sizes and types
        key = dest_stage, tuple(tensor.shape), tensor.dtype
        sent = before.get(key, tensor)
        before[key] = tensor.detach().clone()
        return send(sent.contiguous(), dest_stage)

    p2p.send = late


def wrong_group() -> None:
    """Leave every rank alone in its tensor-parallel group."""
    from ezpz_llm.training.dist.degrees import Degrees

    peers = Degrees.peers
    Degrees.peers = lambda self, rank, *axes: (  # type: ignore[method-assign]
        [rank] if axes == ("tp",) else peers(self, rank, *axes))


FAULTS = {name.__name__: name for name in (wrong_values, skipped_collective, stale_checkpoint, wrong_send_order,
                                           wrong_group)}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    run_program(sys.argv[2:])
