"""Import DeepSpeed without its output and without compiling ops."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from types import ModuleType
from typing import Any

from ezpz_llm.training.dist import deepspeed_patches
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.deepspeed_internals import loaded_ops
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
    with deepspeed_patches.without_mlflow():
        import deepspeed
        import deepspeed.ops.adam
    deepspeed_patches.import_muon()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed_patches.turn_off_unused_ops(deepspeed)
    deepspeed_patches.set_communication_backend(deepspeed, DEVICES[device_type].collectives)
    deepspeed_patches.forget_earlier_engines(deepspeed, live_groups())
    return deepspeed


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
    ops = loaded_ops()
    if name in ops:
        return
    spec: Any = importlib.util.spec_from_file_location(name, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ops[name] = module
    if name in _SHARED:
        # DeepSpeed's loader finds the registered module, and exports its symbols to ops that depend on it.
        from deepspeed.accelerator import get_accelerator

        get_accelerator().create_op_builder(OPS[name]).load()
