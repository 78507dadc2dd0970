"""Importing DeepSpeed so that it stays quiet and compiles nothing."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.dist.private_names import WORLD
from ezpz_llm.layout.ops import BUILT_ON, OPS, built_library, refuse_unbuilt

_SHARED = frozenset(name for names in BUILT_ON.values() for name in names)


def import_deepspeed(device_type: str) -> ModuleType:
    """DeepSpeed for this kind of device, with its messages below errors turned off."""
    # Read when DeepSpeed is first imported; without it a CPU run on a machine with GPUs would take a GPU.
    if device_type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    # DeepSpeed calls collectives by names that torch has since renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"deepspeed\..*|torch\.distributed\..*")
    with _not_installed("mlflow"):  # which DeepSpeed's autotuner imports, unused: a second and 1,500 modules
        import deepspeed
        import deepspeed.ops.adam
    _import_muon()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Else the first process group compiles them, on every rank; nothing in training uses them. Where Intel's oneCCL
    # bindings are installed, DeepSpeed takes its own backend "ccl", whatever torch's process group is of.
    deepspeed.ops.__compatible_ops__.update(deepspeed_shm_comm=False, deepspeed_ccl_comm=False)
    deepspeed.accelerator.get_accelerator()._communication_backend_name = DEVICES[device_type].collectives
    # Left by an engine that this process built before: its layout, hpZ's group, which zero.Init makes only once,
    # and the group of a world that is no more.
    groups = deepspeed.utils.groups
    groups.mpu = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    if groups._WORLD_GROUP not in WORLD.pg_map:
        groups._WORLD_GROUP = None
    return deepspeed


@contextmanager
def _not_installed(name: str) -> Iterator[None]:
    """Within it this module cannot be imported, unless it was before."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def _import_muon() -> None:
    """Import DeepSpeed's Muon optimizer with its kernels left as plain functions.

    Every ZeRO engine imports it, whatever the optimizer is; there is no way to choose it here. To decorate its
    kernels for compilation DeepSpeed would load all of torch's compiler, which takes a second.
    """
    compiler: Any = importlib.import_module("deepspeed.runtime.compiler")
    usual = getattr(compiler, "compile", None)
    if usual is None:
        return  # DeepSpeed 0.17 has the kernels as plain functions
    compiler.compile = lambda: lambda kernel: kernel
    try:
        with suppress(ModuleNotFoundError):  # another release may have it elsewhere
            importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = usual


def load_op(name: str) -> None:
    """Let DeepSpeed find a compiled op where `doctor --build-ops` put it, without asking a compiler.

    What it is built on must be loaded before.

    DeepSpeed's own way would take the op's lock and run ninja on every rank, and compile where nothing is built.

    Raises:
        UserError: it is not built for this Python, torch and processor.
    """
    refuse_unbuilt([name])
    library = built_library(name)
    if library is None:
        return  # compiled into this installation of DeepSpeed
    from deepspeed.ops.op_builder.builder import OpBuilder

    if name in OpBuilder._loaded_ops:
        return
    spec: Any = importlib.util.spec_from_file_location(name, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    OpBuilder._loaded_ops[name] = module
    if name in _SHARED:
        # DeepSpeed's loader finds the module just named, and makes its symbols known to the ops built on it.
        from deepspeed.accelerator import get_accelerator

        get_accelerator().create_op_builder(OPS[name]).load()
