"""Trace of one step: its collectives in order, with kind, group and bytes, and the memory that it allocates."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable
from itertools import accumulate, combinations
from typing import Any, NamedTuple

import torch

from ezpz_llm.dist import Dist
from ezpz_llm.dist.degrees import AXES
from ezpz_llm.dist.links import measure_links
from ezpz_llm.dist.mesh import Mesh
from ezpz_llm.dist.private_names import tree_leaves
from ezpz_llm.engine.base import Engine
from ezpz_llm.engine.collectives import MOVE_NOTHING, CollectiveMode, group_ranks, issued
from ezpz_llm.engine.live_memory import buckets, state_storages, taken


class StepTrace:
    """Record the collectives and the transient memory of one step, which the steps after it repeat.

    A trace has the names and times of collectives alone. Counting makes every operator of the step a Python call,
    so that it is not done in the steps that are traced.

    Attributes:
        found: once the step has passed: `collectives` in order, each with its kind, the axes of its group ("dp",
            "dp sp"), the ranks in it, the bytes of its whole buffer and, for sends and receives, the other rank;
            `transient_bytes`, the most that the step allocated and had not freed; what `BufferLog` and
            `DeepSpeedTools` find; `links`, how fast neighbouring nodes send to each other.
    """

    def __init__(self, step: int, dist: Dist, engine: Engine, *, counts: bool = True,
                 products: float | None = None) -> None:
        self._step = step
        self._dist = dist
        self._engine = engine
        self._counts = counts
        self._log: _CollectiveLog | None = None
        self._tools = DeepSpeedTools(engine, products)
        self._profiler: torch.profiler.profile | None = None
        self.found: dict[str, Any] = {}

    def before_step(self, step: int) -> None:
        """Start before the one step (not where blocks are compiled, which counting would keep from it)."""
        if step == self._step and self._counts:
            self._profiler = torch.profiler.profile(profile_memory=True)
            self._profiler.start()
            self._tools.start()
            self._log = _CollectiveLog(self._dist.mesh, self._engine)
            self._log.__enter__()

    def after_step(self, step: int) -> None:
        """Stop after it, and measure the links between nodes."""
        self.close()
        if step == self._step:
            self.found["links"] = measure_links(self._dist, socket.gethostname())

    def close(self) -> None:
        """The same for a run that ends within the step."""
        if self._log is None or self._profiler is None:
            return
        self._log.__exit__(None, None, None)
        self._profiler.stop()
        self.found = {"collectives": self._log.calls, **self._tools.stop(), **self._log.buffers.found(),
                      "transient_bytes": _transient(self._profiler, self._engine.device)}
        self._log = self._profiler = None


class _CollectiveLog(CollectiveMode):
    def __init__(self, mesh: Mesh, engine: Engine) -> None:
        super().__init__()
        self._mesh = mesh
        self.calls: list[dict[str, Any]] = []
        self.buffers = BufferLog(engine)

    def observe(self, name: str, args: tuple[Any, ...]) -> None:
        """Keep a call of torch.distributed: its kind, ranks and bytes."""
        ranks = group_ranks(args)
        kind, size = (name, 0) if name in MOVE_NOTHING else issued(name, args)[::2]
        call = {"kind": kind, "axes": self._axes(ranks), "ranks": ranks, "bytes": size}
        if name in ("send", "recv_"):
            call["peer"] = ranks[args[2]]
        self.calls.append(call)
        self.buffers.observe(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))

    def _axes(self, ranks: list[int]) -> str:
        mesh = self._mesh
        for count in range(1, len(AXES) + 1):
            for axes in combinations(AXES, count):
                if mesh.size(*axes) > 1 and mesh.degrees.peers(mesh.rank, *axes) == ranks:
                    return " ".join(axes)
        return "alone" if len(ranks) == 1 else ""


def _transient(profiler: torch.profiler.profile, device: torch.device) -> int:
    """The most that was allocated since the beginning and not freed by then."""
    kind = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU"}.get(device.type, "")
    return max(accumulate((event.nbytes() for event in profiler.profiler.kineto_results.events()
                           if event.name() == "[memory]" and event.device_type().name == kind), initial=0))


# What a step's communication takes besides parameters, gradients and moments.
class Size(NamedTuple):
    """Bytes allocated, and those of them that take memory."""

    allocated: int
    taken: int


class BufferLog:
    """Memory of communication buffers, measured at each collective."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = _size(buckets(engine))
        self._buckets = Size(0, 0)
        self._moved: list[dict[int, Size]] = []

    def observe(self, tensors: Iterable[torch.Tensor]) -> None:
        """Measure DeepSpeed's buckets and the tensors that a collective is about to move."""
        self._buckets = max(self._buckets, _size(buckets(self._engine)))
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._moved.append({storage.data_ptr(): _size([storage]) for storage in storages})

    def found(self) -> dict[str, int]:
        """`buffer_bytes`, what the buckets took, or else the most that one collective moved besides states; and
        `buffer_transient_bytes`, what of it was allocated in the step."""
        if self._buckets.allocated:
            return {"buffer_bytes": self._buckets.taken,
                    "buffer_transient_bytes": self._buckets.allocated - self._before.allocated}
        own = state_storages(self._engine)
        most = max((_sum(size for place, size in moved.items() if place not in own) for moved in self._moved),
                   default=Size(0, 0))
        return {"buffer_bytes": most.taken, "buffer_transient_bytes": most.allocated}


def _size(storages: Iterable[torch.UntypedStorage]) -> Size:
    return _sum(Size(storage.nbytes(), taken(storage)) for storage in storages)


def _sum(sizes: Iterable[Size]) -> Size:
    sizes = list(sizes)
    return Size(sum(size.allocated for size in sizes), sum(size.taken for size in sizes))


# DeepSpeed's own tools over one step: what others count beside what we do.
class DeepSpeedTools:
    """Its communication logger and its FLOPs profiler, where DeepSpeed is in use; elsewhere nothing.

    Args:
        products: FLOPs of this rank's matrix products in a step's forward passes, by our arithmetic; None where
            the rank does not compute whole layers, which the FLOPs profiler would not know either.
    """

    def __init__(self, engine: Engine, products: float | None) -> None:
        self._engine = engine
        self._products = products
        self._profiler: Any = None

    def start(self) -> None:
        """Before the step."""
        _log_collectives(True)
        if self._products is not None and "deepspeed" in sys.modules:
            from deepspeed.profiling.flops_profiler import FlopsProfiler

            self._profiler = FlopsProfiler(self._engine.module)
            self._profiler.start_profile()

    def stop(self) -> dict[str, Any]:
        """After it: `deepspeed`, the calls that the logger saw by its names; `flops`, both counts."""
        found: dict[str, Any] = {"deepspeed": _log_collectives(False)}
        if self._profiler is not None:
            # It counts a product's FLOPs as two a multiplication; its own total has other operators in it, too.
            found["flops"] = {"deepspeed": 2 * self._profiler.get_total_macs(), "ours": self._products}
            self._profiler.end_profile()
            self._profiler = None
        return found


def _log_collectives(on: bool) -> dict[str, dict[str, float]]:
    """Turn the logger on or off; what it has seen until then."""
    module = sys.modules.get("deepspeed.comm.comm")
    if module is None:
        return {}
    logger = module.comms_logger
    seen = {name: {"count": sum(entry[0] for entry in sizes.values()),
                   "ms": sum(sum(entry[1]) for entry in sizes.values())}
            for name, sizes in logger.get_raw_data().items()}
    logger.reset_data()
    module.configure(enabled=on, prof_all=on, verbose=False)
    return seen
