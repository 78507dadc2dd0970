"""Estimated and measured memory, as the maximum over ranks."""

from __future__ import annotations

import resource

import torch

from ezpz_llm.core.rundir.records import Memory
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import all_reduce
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.live_memory import gradient_bytes, live_tensor_memory, secondary_bytes
from ezpz_llm.training.layout.knobs import Kind
from ezpz_llm.training.layout.memory import activation_bytes, memory_per_rank, total, unsharded_bytes
from ezpz_llm.training.observe.tables import table
from ezpz_llm.training.trainer.callbacks.callback import Callback, CallbackContext
from ezpz_llm.training.trainer.memory_estimate import forward_pass
from ezpz_llm.training.trainer.plan import RunPlan

STATES: tuple[Kind, ...] = ("parameters", "gradients", "optimizer", "copy")
_SECONDARY: Kind = "secondary"
"""Second copy of the parameters, under hpZ only."""
_UNSHARDED = "whole"
_NAMES: dict[str, str] = {"copy": "master weights", _SECONDARY: "second copy of parameters (hpZ)",
                          _UNSHARDED: "temporarily unsharded (fsdp2)"}


class MemoryWatch(Callback):
    """Measurement of an engine's tensors: gradients and hpZ's second copy in the optimizer step, which frees them,
    and all others at the end of the run.

    Attributes:
        memory: the result, once the run has ended; None if the measurement failed.
    """

    def __init__(self, plan: RunPlan, engine: Engine) -> None:
        self.memory: Memory | None = None
        self._plan, self._engine = plan, engine
        self._at_step: dict[str, int] = {}
        engine.step_skip.at_step = self._measure

    def _measure(self) -> None:
        # The optimizer step frees both.
        self._at_step = {"gradients": gradient_bytes(self._engine), _SECONDARY: secondary_bytes(self._engine)}

    def on_train_end(self, context: CallbackContext) -> None:
        """Compare estimated and measured memory; a failure is only a warning."""
        self.memory = context.dist.optional.attempt_together("the memory report", lambda: self.result(context.dist))

    def result(self, dist: Dist) -> Memory:
        """Return estimated and measured memory. Collective."""
        plan = self._plan
        kinds = live_tensor_memory(self._engine, {})
        live = {"parameters": kinds["parameters"], "gradients": 0, "optimizer": kinds["moments"],
                "copy": kinds["master"], _SECONDARY: 0, **self._at_step}
        resolved = plan.resolved
        parts = memory_per_rank(resolved.layout, plan.model, dist.world_size, resolved.optimizer,
                                resolved.precision, resolved.gradients)
        shown: tuple[Kind, ...] = (*STATES, *(part.kind for part in parts if part.kind == _SECONDARY))
        peak, reserved = _peak(dist.device)
        numbers = torch.tensor([*(live[kind] for kind in shown), peak, reserved or 0, _cpu_peak()])
        *states, peak, most_reserved, host_peak = all_reduce(dist, numbers, torch.distributed.ReduceOp.MAX).tolist()
        measured: dict[str, int] = dict(zip(shown, states, strict=True))
        expected: dict[str, int] = {kind: total(parts, "device", kind) for kind in shown}
        if dist.device.type in ("cuda", "xpu"):
            # The peak minus the states on the device; offloaded states are not part of the peak.
            measured["activations"] = peak - sum(measured[kind] for kind in shown if expected[kind])
        expected[_UNSHARDED] = unsharded_bytes(resolved.layout, plan.model, resolved.precision,
                                               resolved.batch.accumulation)
        expected["activations"] = activation_bytes(resolved.layout, plan.model, forward_pass(plan, dist.device))
        return Memory(
            expected={**expected}, measured={**measured}, peak=peak, host_peak=host_peak,
            elsewhere={kind: total(parts, "host", kind) + total(parts, "files", kind) for kind in shown},
            reserved=None if reserved is None else most_reserved)


def memory_table(memory: Memory, rich: bool = False) -> str:
    """Return the table of estimated and measured memory as text."""
    states = sum(memory.expected.values()) + sum(memory.elsewhere.values())
    unit, size, digits = ("GB", 1e9, 2) if states >= 1e9 else ("MB", 1e6, 1)

    def show(count: float | None) -> str:
        return "-" if count is None else f"{count / size:.{digits}f}"

    rows = []
    for kind, expected in memory.expected.items():
        elsewhere = memory.elsewhere.get(kind, 0)
        measured = memory.measured.get(kind)
        if expected or elsewhere or measured:
            rows.append([_NAMES.get(kind, kind) + (" (not on the device)" if elsewhere else ""),
                         show(expected + elsewhere), show(measured)])
    text = table(f"Memory in {unit}, each kind on the rank that uses most of it", ("", "estimate", "measured"),
                 rows, footer=("estimated sum, measured peak", show(states), show(memory.peak)), rich=rich)
    if memory.reserved is not None:
        return text + f"  The allocator reserved at most {show(memory.reserved)} {unit}.\n"
    return text + "  The peak is that of the whole process, including Python, libraries and data.\n"


def _peak(device: torch.device) -> tuple[int, int | None]:
    """Return peak allocated and reserved bytes; on devices without counters, the peak size of the process and
    None."""
    if device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        return module.max_memory_allocated(device), module.max_memory_reserved(device)
    return _cpu_peak(), None


def _cpu_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
