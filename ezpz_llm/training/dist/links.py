"""Quick measurement of the bandwidth between neighboring nodes."""

from __future__ import annotations

import time

import torch

from ezpz_llm.core.rundir.schemas import Link
from ezpz_llm.training.dist.agreement import all_gather
from ezpz_llm.training.dist.setup import Dist

_BYTES = 2 ** 20
_REPEATS = 3


def measure_links(dist: Dist, host: str) -> list[Link]:
    """Measure each link in a ring of all nodes, in both directions. Returns the same list on all ranks. Collective.

    Pairs that share a node measure in different rounds, so that no node sends or receives two messages at a time.
    Returns an empty list on a single node. Takes about as long as a node needs to send 18 MB.

    Args:
        host: hostname of this rank's node.
    """
    firsts = _first_ranks(dist, host)
    names = list(firsts)
    if len(names) < 2:
        return []
    pairs = [(i, (i + 1) % len(names)) for i in range(len(names) if len(names) > 2 else 1)]
    buffer = torch.zeros(_BYTES // 4, device=dist.device)
    own: list[Link] = []
    has_odd_length = len(names) % 2 == 1
    for round_number in range(3):
        for i, j in pairs:
            round_of_pair = 2 if has_odd_length and i == len(names) - 1 else i % 2
            if round_of_pair == round_number:
                for sender, receiver in ((i, j), (j, i)):
                    own += _send(dist, buffer, firsts, names[sender], names[receiver])
        dist.barrier()
    return [link for links in all_gather(dist, own) for link in links]


def _first_ranks(dist: Dist, host: str) -> dict[str, int]:
    firsts: dict[str, int] = {}
    for rank, name in enumerate(all_gather(dist, host)):
        firsts.setdefault(name, rank)
    return firsts


def _send(dist: Dist, buffer: torch.Tensor, firsts: dict[str, int], sender: str, receiver: str) -> list[Link]:
    """Measure one direction. Only the receiver, which knows when all data has arrived, returns a result."""
    source, target = firsts[sender], firsts[receiver]
    if dist.rank not in (source, target):
        return []
    best = float("inf")
    for _ in range(_REPEATS):
        if dist.rank == source:
            # Wait for the receiver's message that it is ready.
            torch.distributed.recv(buffer[:1], target)
            torch.distributed.send(buffer, target)
            continue
        began = time.perf_counter()
        torch.distributed.send(buffer[:1], source)
        torch.distributed.recv(buffer, source)
        buffer[-1].item()  # on a device, recv returns before the data has arrived
        best = min(best, time.perf_counter() - began)
    return [] if dist.rank == source else [Link(sender=sender, receiver=receiver, rate=_BYTES / best)]
