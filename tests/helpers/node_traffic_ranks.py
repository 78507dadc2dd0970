"""Run by two ranks per node: bytes of the collectives of a training step, by phase, kind and group.

    RANK=… WORLD_SIZE=… python3 tests/helpers/node_traffic_ranks.py FOLDER bf16:zero3 bf16_autocast:pp2_tp2 …

ZeRO-3 releases even small parameters. Rank 0 writes FOLDER/results.json: for each run a list of rows for each rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from divided_ranks import make_engine, small_thresholds
from rank_jobs import sequences, take_runs
from tensor_parallel_ranks import everyone

from ezpz_llm.training.dist import Dist, Mesh
from ezpz_llm.training.engine.collectives import MOVE_NOTHING, CollectiveMode, group_ranks, issued
from ezpz_llm.training.model.config import get_model_config

RANKS_PER_NODE = 2
GLOBAL_BATCH = 16
CONFIG = get_model_config("tiny-gpt2", n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=64, dropout=0.0)
AXES = ("tp", "sp", "pp", "dp")


class Traffic(CollectiveMode):
    """Bytes of collectives by phase, kind, and ranks, without single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.bytes: Counter[tuple[str, str, tuple[int, ...]]] = Counter()

    def observe(self, name: str, args: tuple[Any, ...]) -> None:
        """Add the bytes of a call."""
        kind, elements, size = issued(name, args)
        ranks = tuple(group_ranks(args))
        if name not in MOVE_NOTHING and elements > 1 and len(ranks) > 1:
            self.bytes[self.phase, kind, ranks] += size

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Name the phase of the calls inside."""
        self.phase, outer = phase, self.phase
        yield
        self.phase = outer

    def rows(self, mesh: Mesh) -> list[dict[str, Any]]:
        """Return a row for each phase, kind and group, with the axis of the group and whether it spans nodes."""
        peers = {tuple(mesh.degrees.peers(mesh.rank, axis)): axis for axis in AXES}
        return [{"phase": phase, "kind": kind, "axis": peers.get(ranks, "other"), "bytes": size,
                 "spans_nodes": len({rank // RANKS_PER_NODE for rank in ranks}) > 1}
                for (phase, kind, ranks), size in self.bytes.items()]


def observed(dist: Dist, run: str) -> list[list[dict[str, Any]]]:
    """Return the traffic of the second step by rank."""
    precision, name = run.split(":")
    layout = small_thresholds(name, dist) if name.startswith("zero3") else name
    engine = make_engine(dist, layout, CONFIG, precision, global_batch=GLOBAL_BATCH)
    rows = sequences(0, GLOBAL_BATCH, CONFIG.block_size + 1).chunk(engine.batch.dp_size)[dist.mesh.dp_rank]
    batches = [(part[:, :-1], part[:, 1:]) for part in rows.chunk(engine.batch.accumulation)]
    engine.train_step(batches, 1e-3, Traffic().timed)
    with Traffic() as traffic:
        engine.train_step(batches, 1e-3, traffic.timed)
    return everyone(traffic.rows(dist.mesh))


if __name__ == "__main__":
    take_runs(observed)
