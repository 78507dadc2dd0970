"""DeepSpeed's own tools over one step: what others count beside what we do."""

from __future__ import annotations

import sys
from typing import Any

from ezpz_llm.engine.base import Engine


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
