"""Trace of one step: its collectives in order, with kind, group and bytes, and its memory allocations."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable
from itertools import accumulate, combinations
from typing import Any, NamedTuple

import torch

from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.deepspeed_internals import log_collectives
from ezpz_llm.training.dist.degrees import AXES
from ezpz_llm.training.dist.links import measure_links
from ezpz_llm.training.dist.mesh import Mesh
from ezpz_llm.training.dist.torch_internals import tree_leaves
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.collectives import MOVE_NOTHING, CollectiveMode, group_ranks, issued
from ezpz_llm.training.engine.live_memory import buckets, resident_bytes, state_storages


class StepTrace:
    """Recorder of the collectives and the transient memory of one step, as an example of later steps.

    Profiler traces have only names and times of collectives. Counting calls Python for every operator, so StepTrace
    records a different step than the trace profiler.

    Attributes:
        found: results of the step. `collectives` lists the calls in order, each with its kind, the axes of its
            group ("dp", "dp sp"), the ranks in it, the bytes of its whole buffer and, for sends and receives, the
            other rank. `transient_bytes` is the peak of memory allocated during the step. `links` is the measured
            bandwidth between neighboring nodes. The other results are those of `_BufferLog` and `_DeepSpeedTools`.
    """

    def __init__(self, step: int, dist: Dist, engine: Engine, *, counts: bool = True,
                 products: float | None = None) -> None:
        self._step = step
        self._dist = dist
        self._engine = engine
        self._counts = counts
        self._log: _CollectiveLog | None = None
        self._tools = _DeepSpeedTools(engine, products)
        self._profiler: torch.profiler.profile | None = None
        self.found: dict[str, Any] = {}

    def before_step(self, step: int) -> None:
        """Start recording if this is the recorded step and `counts` is True.

        `counts` must be False if blocks are compiled, since counting disables compiled code.
        """
        if step == self._step and self._counts:
            self._profiler = torch.profiler.profile(profile_memory=True)
            self._profiler.start()
            self._tools.start()
            self._log = _CollectiveLog(self._dist.mesh, self._engine)
            self._log.__enter__()

    def after_step(self, step: int) -> None:
        """Stop after the recorded step, and measure the links between nodes."""
        self.close()
        if step == self._step:
            self.found["links"] = measure_links(self._dist, socket.gethostname())

    def close(self) -> None:
        """Stop and store the results; runs that end within the recorded step call this too."""
        if self._log is None or self._profiler is None:
            return
        self._log.__exit__(None, None, None)
        self._profiler.stop()
        self.found = {"collectives": self._log.calls, **self._tools.stop(), **self._log.buffers.found(),
                      "transient_bytes": _transient_peak(self._profiler, self._engine.device)}
        self._log = self._profiler = None


class _CollectiveLog(CollectiveMode):
    def __init__(self, mesh: Mesh, engine: Engine) -> None:
        super().__init__()
        self._mesh = mesh
        self.calls: list[dict[str, Any]] = []
        self.buffers = _BufferLog(engine)

    def observe(self, name: str, args: tuple[Any, ...]) -> None:
        """Record the kind, ranks and bytes of a c10d call."""
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


def _transient_peak(profiler: torch.profiler.profile, device: torch.device) -> int:
    """Return the peak of memory allocated since the start of the profile."""
    kind = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU"}.get(device.type, "")
    return max(accumulate((event.nbytes() for event in profiler.profiler.kineto_results.events()
                           if event.name() == "[memory]" and event.device_type().name == kind), initial=0))


class Size(NamedTuple):
    """Allocated bytes, and the resident part of them."""

    allocated: int
    resident: int


class _BufferLog:
    """Recorder, at each collective, of the memory of communication buffers outside the training state."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._initial = _size(buckets(engine))
        self._buckets = Size(0, 0)
        self._moved: list[dict[int, Size]] = []

    def observe(self, tensors: Iterable[torch.Tensor]) -> None:
        """Measure DeepSpeed's buckets and the tensors of a collective."""
        self._buckets = max(self._buckets, _size(buckets(self._engine)))
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._moved.append({storage.data_ptr(): _size([storage]) for storage in storages})

    def found(self) -> dict[str, int]:
        """Return `buffer_bytes` and `buffer_transient_bytes`, the part allocated during the step.

        The buffers are DeepSpeed's buckets or, if there are none, the largest set of tensors in any one collective,
        excluding the training state.
        """
        if self._buckets.allocated:
            return {"buffer_bytes": self._buckets.resident,
                    "buffer_transient_bytes": self._buckets.allocated - self._initial.allocated}
        state = state_storages(self._engine)
        peak = max((_sum(size for address, size in moved.items() if address not in state) for moved in self._moved),
                   default=Size(0, 0))
        return {"buffer_bytes": peak.resident, "buffer_transient_bytes": peak.allocated}


def _size(storages: Iterable[torch.UntypedStorage]) -> Size:
    return _sum(Size(storage.nbytes(), resident_bytes(storage)) for storage in storages)


def _sum(sizes: Iterable[Size]) -> Size:
    sizes = list(sizes)
    return Size(sum(size.allocated for size in sizes), sum(size.resident for size in sizes))


class _DeepSpeedTools:
    """DeepSpeed's communication logger and FLOPs profiler during one step, to compare with ezpz_llm's own counts.

    Does nothing in runs without DeepSpeed.

    Args:
        products: estimated FLOPs of this rank's matmuls in the forward passes of a step; None if the rank
            does not compute whole layers, which the FLOPs profiler does not support.
    """

    def __init__(self, engine: Engine, products: float | None) -> None:
        self._engine = engine
        self._products = products
        self._profiler: Any = None

    def start(self) -> None:
        """Start the communication logger and the FLOPs profiler."""
        log_collectives(True)
        if self._products is not None and "deepspeed" in sys.modules:
            from deepspeed.profiling.flops_profiler import FlopsProfiler

            self._profiler = FlopsProfiler(self._engine.module)
            self._profiler.start_profile()

    def stop(self) -> dict[str, Any]:
        """Stop, and return `deepspeed` (logged calls by name) and `flops` (DeepSpeed's and our counts)."""
        results: dict[str, Any] = {"deepspeed": log_collectives(False)}
        if self._profiler is not None:
            # Two FLOPs per multiply-accumulate; the profiler's FLOPs total includes operators other than matmuls.
            results["flops"] = {"deepspeed": 2 * self._profiler.get_total_macs(), "ours": self._products}
            self._profiler.end_profile()
            self._profiler = None
        return results
