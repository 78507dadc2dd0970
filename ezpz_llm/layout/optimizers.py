"""Table of optimizers: name, state in bytes an element, and what each requires (imports no torch).

A new optimizer is a row here and a function in `ezpz_llm.engine.optimizers.BUILD`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ezpz_llm.base.errors import UserError
from ezpz_llm.layout.layout import Layout


@dataclass(frozen=True)
class Optimizer:
    """One row of the table.

    Attributes:
        printed: its name in the start-up text.
        state: kinds of state, by the names that checkpoints use, and their bytes an element.
        is_elementwise: whether an element's step depends on that element alone, so that copies of a parameter on
            tensor-parallel ranks or pipeline stages remain alike.
        can_offload: whether DeepSpeed's CPU Adam makes the same step where a layout offloads optimizer state.
        is_known_to_deepspeed: False where ZeRO has to be told to take it.
        package, extra: the module that it is imported from, and the extra of ezpz_llm that installs it.
    """

    name: str
    printed: str
    state: Mapping[str, int]
    is_elementwise: bool = True
    can_offload: bool = False
    is_known_to_deepspeed: bool = True
    package: str | None = None
    extra: str = ""

    @property
    def state_bytes(self) -> int:
        """Bytes of state an element. Small tensors may take more."""
        return sum(self.state.values())


_FP32 = {"exp_avg": 4, "exp_avg_sq": 4}
OPTIMIZERS: dict[str, Optimizer] = {row.name: row for row in (
    Optimizer("adamw", "AdamW", _FP32, can_offload=True),
    Optimizer("adamw_unfused", "AdamW (unfused)", _FP32),
    Optimizer("adamw_8bit", "AdamW (moments in 8 bits)", {"exp_avg": 1, "exp_avg_sq": 1}, is_elementwise=False,
              is_known_to_deepspeed=False, package="bitsandbytes", extra="8bit"),
)}
if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]
"""The names of the table."""


def check_optimizer(name: OptimizerName, layout: Layout) -> None:
    """Refuse an optimizer that a layout cannot have, or that is not installed.

    Raises:
        UserError: says why.
    """
    row = OPTIMIZERS[name]
    where, instead = f"--optimizer {name}", "--optimizer adamw"
    if not row.can_offload and layout.zero.offload_optimizer is not None:
        raise UserError("offloaded state is stepped by DeepSpeed's own AdamW on the CPU", where=where,
                        instead=f"{instead}, or a layout without offload")
    if not row.is_elementwise and (layout.tp > 1 or layout.pp > 1):
        raise UserError("with moments in 8 bits, copies of a parameter on tensor-parallel ranks or pipeline stages "
                        "would come apart: a block's scale depends on its neighbours", where=where, instead=instead)
    if row.package is not None and importlib.util.find_spec(row.package) is None:
        raise UserError(f"{row.package} is not installed", where=where,
                        instead=f"pip install 'ezpz_llm[{row.extra}]', or {instead}")
