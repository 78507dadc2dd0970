"""Distributed types of a layout's program, checked on one rank of a fake world.

These parts of a program have no types:

- torch's gathers of parameters and reduction of gradients under `fsdp2`, and the reduction of fp32 gradients under
  `ddp`. Their groups are checked.
- DeepSpeed's reduction, partitioning, gathers, offloading, and gradient norm. Its groups and the marks of sharded
  parameters are checked.
- The backward pass of DeepSpeed's all-to-all in sequence parallelism.
- Sends between pipeline stages, and the sum of a tied embedding over them: stages run different programs.
"""

from __future__ import annotations

import re
from typing import Any

from spmd_types import SpmdTypeError
from type_program import fake_rank, run_program
from type_reduction import check_reduction

from ezpz_llm.training.layout.layout import Layout
from ezpz_llm.training.model.config import ModelConfig

WORLD = 4096


def find_fault(layout: Layout, config: ModelConfig) -> str | None:
    """Return the module, the operation and the types of the first error in a layout's program, or None."""
    for stage in range(layout.pp):
        with fake_rank(layout, config, stage, WORLD) as rank:
            try:
                run_program(rank)
                check_reduction(rank)
            except SpmdTypeError as error:
                return f"{rank.program.where[-1]}: {_describe(error, rank.program.axes)}"
    return None


def _describe(error: Any, axes: dict[str, Any]) -> str:
    """Return the first line of an error, with the operation and the names of axes."""
    text = error.args[0].splitlines()[0].replace("PerMeshAxisLocalSpmdType.", "")
    if operation := re.search(r"In (\w+)\(", error.context or ""):
        text = f"{operation[1]}: {text}"
    for name, axis in axes.items():
        text = text.replace(repr(axis), name)
    return text
