"""Import DeepSpeed without its output and without compiling ops."""

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

from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.torch_internals import live_groups
from ezpz_llm.training.layout.ops import OP_DEPENDENCIES, OPS, built_library, reject_unbuilt_ops

_SHARED = frozenset(name for names in OP_DEPENDENCIES.values() for name in names)


def import_deepspeed(device_type: str) -> ModuleType:
    """Import DeepSpeed for this device type, with messages below errors turned off."""
    # DeepSpeed's first import reads DS_ACCELERATOR; without it, a CPU run on a machine with GPUs would use a GPU.
    if device_type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    # DeepSpeed calls collectives by names that torch has deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"deepspeed\..*|torch\.distributed\..*")
    with _hide_module("mlflow"):  # DeepSpeed's unused autotuner imports it: 1,500 modules, one second
        import deepspeed
        import deepspeed.ops.adam
    _import_muon()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Otherwise the first process group compiles these ops on every rank, though training does not use them. With
    # Intel's oneCCL bindings installed, DeepSpeed would use its backend "ccl", whatever torch's process group uses.
    deepspeed.ops.__compatible_ops__.update(deepspeed_shm_comm=False, deepspeed_ccl_comm=False)
    deepspeed.accelerator.get_accelerator()._communication_backend_name = DEVICES[device_type].collectives
    # Globals that an earlier engine of this process set: its mpu, hpZ's group, which zero.Init creates only once,
    # and the group of a destroyed world.
    groups = deepspeed.utils.groups
    groups.mpu = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    if groups._WORLD_GROUP not in live_groups():
        groups._WORLD_GROUP = None
    return deepspeed


@contextmanager
def _hide_module(name: str) -> Iterator[None]:
    """Make imports of this module fail, unless it is already imported."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def _import_muon() -> None:
    """Import DeepSpeed's Muon optimizer with its kernels as plain functions.

    Every ZeRO engine imports it, but this package has its own Muon. Decorating its kernels for compilation would
    import torch's compiler, which takes a second.
    """
    compiler: Any = importlib.import_module("deepspeed.runtime.compiler")
    original = getattr(compiler, "compile", None)
    if original is None:
        return  # in DeepSpeed 0.17 the kernels are plain functions
    compiler.compile = lambda: lambda kernel: kernel
    try:
        with suppress(ModuleNotFoundError):  # other releases may have it elsewhere
            importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = original


def load_op(name: str) -> None:
    """Register a compiled op from `doctor --build-ops` with DeepSpeed, without running a compiler.

    Load the ops that it depends on first. DeepSpeed's own loader would lock the op and run ninja on every
    rank, and compile if the op is not built.

    Raises:
        UserError: the op is not built for this Python, torch and processor.
    """
    reject_unbuilt_ops([name])
    library = built_library(name)
    if library is None:
        return  # prebuilt in this installation of DeepSpeed
    from deepspeed.ops.op_builder.builder import OpBuilder

    if name in OpBuilder._loaded_ops:
        return
    spec: Any = importlib.util.spec_from_file_location(name, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    OpBuilder._loaded_ops[name] = module
    if name in _SHARED:
        # DeepSpeed's loader finds the registered module, and exports its symbols to ops that depend on it.
        from deepspeed.accelerator import get_accelerator

        get_accelerator().create_op_builder(OPS[name]).load()
