"""Decision to compile a run's blocks, by the user or by device and layout (imports no torch)."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

from ezpz_llm.base import UserError
from ezpz_llm.layout.layout import Layout
from ezpz_llm.layout.value_source import Origin, ValueSource

_COMPILES = "cuda"
"""NVIDIA and AMD GPUs. On other devices, compiling takes minutes or is untested."""


def choose_compile(asked: bool | None, source: ValueSource, device: str | None, layout: Layout,
                   dropout: float) -> tuple[bool, ValueSource]:
    """Return whether blocks are compiled, with the reason as the value's source.

    Args:
        asked: the user's choice, if any.
        source: source of `asked`.
        device: type of the device; None or "auto" if unknown, in which case the default is not to compile.
        dropout: dropout probability of the model.

    Raises:
        UserError: the user chose to compile under a layout that compiling makes slower.
    """
    broken = graph_break_reason(layout, dropout)
    if asked and layout.zero.stage == 3:
        instead = "--compile false" if layout.zero.offload_param or layout.zero.offload_optimizer or layout.tp > 1 \
            else "--ds-config fsdp2, which shards as much and compiles, or --compile false"
        raise UserError(f"--compile true would make steps slower: {broken}",
                        where=f"compile ({source})", instead=instead)
    if asked is not None:
        return asked, source
    if device != _COMPILES:
        known = device not in (None, "auto")
        return False, ValueSource(Origin.DERIVED, f"device {device}" if known else "the device, not known yet")
    if broken:
        return False, ValueSource(Origin.DERIVED, f"layout {layout.name}: {broken}")
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
    """Return the tool that torch.compile lacks on this node for a device type; None if nothing is missing."""
    if missing := _compilers(device):
        return f"a compiler ({missing})"
    return "the package triton" if device == _COMPILES and find_spec("triton") is None else None


def check_compiler(device: str, source: ValueSource) -> None:
    """Check that this node has the compiler that torch.compile needs.

    Raises:
        UserError: there is none; the message lists the compilers that were searched for.
    """
    if missing := _compilers(device):
        raise UserError(f"torch.compile needs a compiler, and none of these is on PATH: {missing}",
                        where=f"compile ({source})",
                        instead="install g++, load a module with a compiler, set CXX, or --compile false")


def _compilers(device: str) -> str | None:
    """Return the compilers to choose from if none is installed; None if one is.

    torch.compile builds its kernels with g++ (or $CXX) on CPUs; on GPUs Triton builds a module with a C compiler.
    """
    candidates = [os.environ.get("CXX", "g++")]
    if device != "cpu":
        candidates += [os.environ.get("CC", "gcc"), "clang"]
    return None if any(map(shutil.which, candidates)) else ", ".join(candidates)
