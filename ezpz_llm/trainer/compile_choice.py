"""Choice to compile a run's blocks: the user's, or by its device and layout (imports no torch)."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

from ezpz_llm.base import UserError
from ezpz_llm.layout.layout import Layout
from ezpz_llm.layout.value_source import Origin, ValueSource

_COMPILES = "cuda"
"""NVIDIA's and AMD's GPUs. Elsewhere compiling costs minutes, or was not tried."""


def choose_compile(asked: bool | None, source: ValueSource, device: str | None, layout: Layout,
                   dropout: float) -> tuple[bool, ValueSource]:
    """Return whether blocks are compiled, with the reason as the value's source.

    Args:
        asked: None where nobody said.
        source: of what was asked.
        device: its type, None or "auto" where it is not known: then nothing is compiled yet.
        dropout: the model's.

    Raises:
        UserError: it was asked for under a layout that it makes slower.
    """
    broken = breaks_graph(layout, dropout)
    if asked and layout.zero.stage == 3:
        instead = "--compile false" if layout.zero.offload_param or layout.zero.offload_optimizer or layout.tp > 1 \
            else "--ds-config fsdp2, which shards as much and compiles, or --compile false"
        raise UserError(f"compile is true: {broken}, and a step would be slower than without",
                        where=f"compile ({source})", instead=instead)
    if asked is not None:
        return asked, source
    if device != _COMPILES:
        known = device not in (None, "auto")
        return False, ValueSource(Origin.DERIVED, f"device {device}" if known else "the device, not known yet")
    if broken:
        return False, ValueSource(Origin.DERIVED, f"layout {layout.name}: {broken}")
    return True, ValueSource(Origin.DERIVED, f"device {device} and layout {layout.name}")


def breaks_graph(layout: Layout, dropout: float) -> str | None:
    """Why a block is not compiled to one graph that all blocks share; None where it is.

    tests/engine/test_compiled_layouts.py counts graphs under every layout.
    """
    if layout.zero.stage == 3:
        return "ZeRO stage 3's hooks break a block's graph at each of its layers"
    if layout.sp > 1:
        return "a sequence-parallel exchange breaks a block's graph twice"
    if layout.tp > 1 and dropout:
        return "dropout of sharded heads breaks a block's graph"
    return None


def lacks_compiler(device: str) -> str | None:
    """Return the tool that torch.compile lacks on this node for a device type; None if nothing is missing."""
    if missing := _compilers(device):
        return f"a compiler ({missing})"
    return "the package triton" if device == _COMPILES and find_spec("triton") is None else None


def check_compiler(device: str, source: ValueSource) -> None:
    """Refuse a run that was asked to compile where the host that checks it has no compiler.

    Raises:
        UserError: says which would do.
    """
    if missing := _compilers(device):
        raise UserError(f"torch.compile needs a compiler, and there is none: {missing}",
                        where=f"compile ({source})",
                        instead="install g++, load a module with a compiler, set CXX, or --compile false")


def _compilers(device: str) -> str | None:
    """The compilers of which one is needed, if there is none.

    torch.compile builds its kernels with g++ (or $CXX) on CPUs; on GPUs Triton builds a module with a C compiler.
    """
    wanted = [os.environ.get("CXX", "g++")]
    if device != "cpu":
        wanted += [os.environ.get("CC", "gcc"), "clang"]
    return None if any(map(shutil.which, wanted)) else ", ".join(wanted)
