"""Choice of whether to compile a run's blocks: the user's, or by device and layout (imports no torch)."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

from ezpz_llm.core.base import UserError
from ezpz_llm.training.layout.layout import Layout
from ezpz_llm.training.layout.value_source import Origin, ValueSource

_COMPILED_DEVICE = "cuda"
"""Device type on which blocks are compiled by default: NVIDIA and AMD GPUs. On others, compiling takes minutes or
is untested."""


def choose_compile(requested: bool | None, source: ValueSource, device: str | None, layout: Layout,
                   dropout: float) -> tuple[bool, ValueSource]:
    """Return whether blocks are compiled, with the reason as the value's source.

    Args:
        requested: the user's choice, if any.
        source: source of `requested`.
        device: type of the device; None or "auto" if unknown, in which case the default is not to compile.
        dropout: dropout probability of the model.

    Raises:
        UserError: the user chose to compile under ZeRO stage 3, where compiling makes steps slower.
    """
    graph_break = graph_break_reason(layout, dropout)
    if requested and layout.zero.stage == 3:
        instead = "--compile false" if layout.zero.offload_param or layout.zero.offload_optimizer or layout.tp > 1 \
            else "--ds-config fsdp2, which shards as much and can be compiled, or --compile false"
        raise UserError(f"--compile true would make steps slower: {graph_break}",
                        where=f"compile ({source})", instead=instead)
    if requested is not None:
        return requested, source
    if device != _COMPILED_DEVICE:
        known = device not in (None, "auto")
        return False, ValueSource(Origin.DERIVED, f"device {device}" if known else "the device, not known yet")
    if graph_break:
        return False, ValueSource(Origin.DERIVED, f"layout {layout.name}: {graph_break}")
    return True, ValueSource(Origin.DERIVED, f"device {device} and layout {layout.name}")


def graph_break_reason(layout: Layout, dropout: float) -> str | None:
    """Return the reason for a graph break in a block; None if all blocks share one graph.

    tests/engine/test_compiled_layouts.py counts the graphs under every layout.
    """
    if layout.zero.stage == 3:
        return "ZeRO stage 3's hooks break a block's graph at each of its layers"
    if layout.sp > 1:
        return "the sequence-parallel exchange breaks a block's graph twice"
    if layout.tp > 1 and dropout:
        return "dropout of sharded heads breaks a block's graph"
    return None


def missing_compiler(device: str) -> str | None:
    """Return what torch.compile lacks on this node for a device type; None if nothing is missing."""
    if missing := _missing_compilers(device):
        return f"a compiler ({missing})"
    return "the package triton" if device == _COMPILED_DEVICE and find_spec("triton") is None else None


def check_compiler(device: str, source: ValueSource) -> None:
    """Check that this node has the compiler that torch.compile needs.

    Raises:
        UserError: no compiler is on PATH; the message lists the names that were searched for.
    """
    if missing := _missing_compilers(device):
        raise UserError(f"torch.compile needs a compiler, and none of these is on PATH: {missing}",
                        where=f"compile ({source})",
                        instead="install g++, load a compiler module, set CXX, or pass --compile false")


def _missing_compilers(device: str) -> str | None:
    """Return the compilers that were searched for if none is on PATH; otherwise None.

    torch.compile builds its kernels with g++ (or $CXX) on CPUs; on GPUs Triton builds a module with a C compiler.
    """
    candidates = [os.environ.get("CXX", "g++")]
    if device != "cpu":
        candidates += [os.environ.get("CC", "gcc"), "clang"]
    return None if any(map(shutil.which, candidates)) else ", ".join(candidates)
