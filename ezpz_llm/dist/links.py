"""Bandwidth between neighbouring hosts, measured in a moment."""

from __future__ import annotations

import time

import torch

from ezpz_llm.dist.agree import all_gather
from ezpz_llm.dist.setup import Dist
from ezpz_llm.rundir.schemas import Link

_BYTES = 2 ** 20
_TIMES = 3


def measure_links(dist: Dist, host: str) -> list[Link]:
    """Each host with the next one, in both directions, the last with the first; the same list on all ranks.

    Neighbouring pairs take turns, so that no host sends or receives twice at a time. Empty on a single host.
    Collective; takes about as long as a host needs to send 18 MB.

    Args:
        host: this rank's.
    """
    firsts = _first_ranks(dist, host)
    names = list(firsts)
    if len(names) < 2:
        return []
    pairs = [(i, (i + 1) % len(names)) for i in range(len(names) if len(names) > 2 else 1)]
    buffer = torch.zeros(_BYTES // 4, device=dist.device)
    own: list[Link] = []
    last_is_odd_one = len(names) % 2 == 1
    for turn in range(3):
        for i, j in pairs:
            mine = 2 if last_is_odd_one and i == len(names) - 1 else i % 2
            if mine == turn:
                for sender, receiver in ((i, j), (j, i)):
                    own += _send(dist, buffer, firsts, names[sender], names[receiver])
        dist.barrier()
    return [link for found in all_gather(dist, own) for link in found]


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
    for _ in range(_TIMES):
        if dist.rank == source:
            # The receiver is ready: its word has come.
            torch.distributed.recv(buffer[:1], target)
            torch.distributed.send(buffer, target)
            continue
        began = time.perf_counter()
        torch.distributed.send(buffer[:1], source)
        torch.distributed.recv(buffer, source)
        buffer[-1].item()  # on a device the message has come when this has
        best = min(best, time.perf_counter() - began)
    return [] if dist.rank == source else [Link(sender=sender, receiver=receiver, rate=_BYTES / best)]
