"""Patches of DeepSpeed. No other module may change it.

Written for DeepSpeed 0.19.8. A patch of an attribute that does not exist would have no effect, so it raises a
UserError with the name. This module imports neither DeepSpeed nor torch.

In arguments, `engine` is a `deepspeed.DeepSpeedEngine`, and `zero` is the ZeRO optimizer that wraps the optimizer.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from ezpz_llm.training.dist.deepspeed_names import (
    get_private,
    missing_name_error,
    replaced_private,
    set_private,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup


@contextmanager
def without_mlflow() -> Iterator[None]:
    """Make imports of mlflow fail, unless it is already imported.

    DeepSpeed's unused autotuner imports it: 1,500 modules, one second.
    """
    if "mlflow" in sys.modules:
        yield
        return
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["mlflow"]


def import_muon() -> None:
    """Import DeepSpeed's Muon optimizer with its kernels as plain functions.

    Every ZeRO engine imports it, but this package has its own Muon. Decorating its kernels for compilation would
    import torch's compiler, which takes a second.
    """
    compiler: Any = importlib.import_module("deepspeed.runtime.compiler")
    if not hasattr(compiler, "compile"):
        return  # in DeepSpeed 0.17 the kernels are plain functions
    with replaced_private(compiler, "compile", lambda: lambda kernel: kernel), suppress(ModuleNotFoundError):
        # Other releases may have it elsewhere.
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


def turn_off_unused_ops(deepspeed: ModuleType) -> None:
    """Prevent the compilation of ops for collectives on CPUs, which the first process group starts on every rank.

    Training does not use them. With Intel's oneCCL bindings installed, DeepSpeed would use its backend "ccl",
    whatever torch's process group uses.
    """
    get_private(deepspeed.ops, "__compatible_ops__").update(deepspeed_shm_comm=False, deepspeed_ccl_comm=False)


def set_communication_backend(deepspeed: ModuleType, name: str) -> None:
    """Make DeepSpeed use the backend of torch's process group."""
    set_private(deepspeed.accelerator.get_accelerator(), "_communication_backend_name", name)


def forget_earlier_engines(deepspeed: ModuleType, live_groups: Iterable[ProcessGroup]) -> None:
    """Reset the globals that an earlier engine of this process set.

    They are its model-parallel unit, hpZ's group, which zero.Init creates only once, and the group of a destroyed
    world.
    """
    groups = deepspeed.utils.groups
    set_private(groups, "mpu", None)
    set_private(groups, "_ZERO_PARAM_INTRA_PARALLEL_GROUP", None)
    if get_private(groups, "_WORLD_GROUP") not in live_groups:
        set_private(groups, "_WORLD_GROUP", None)


@contextmanager
def using_groups(deepspeed: ModuleType, make_grid: Callable[..., Any],
                 new_group: Callable[[Any], ProcessGroup | None],
                 hpz_group: Callable[[int], ProcessGroup | None]) -> Iterator[None]:
    """Replace the process groups that DeepSpeed creates for a pipeline module or an engine, in this context.

    Args:
        make_grid: constructor of a replacement for PipelineParallelGrid.
        new_group: replacement for `deepspeed.comm.new_group` in pipelines.
        hpz_group: returns this rank's group of hpZ, given its size.
    """
    module, groups = deepspeed.runtime.pipe.module, deepspeed.utils.groups

    def create_hpz_group(size: int) -> None:
        set_private(groups, "_ZERO_PARAM_INTRA_PARALLEL_GROUP", hpz_group(size))

    get_private(module.dist, "new_group")
    with (replaced_private(module, "PipelineParallelGrid", make_grid),
          replaced_private(module, "dist", SimpleNamespace(**{**vars(deepspeed.comm), "new_group": new_group})),
          replaced_private(groups, "_create_zero_param_parallel_group", create_hpz_group)):
        yield


def send_within(deepspeed: ModuleType, group: ProcessGroup) -> None:
    """Make DeepSpeed's stages send within `group` instead of the group of all ranks."""
    comm, p2p = deepspeed.comm, deepspeed.runtime.pipe.p2p
    set_private(p2p, "dist", SimpleNamespace(**{
        **vars(comm), "send": functools.partial(get_private(comm, "send"), group=group),
        "recv": functools.partial(get_private(comm, "recv"), group=group)}))


@contextmanager
def using_module(engine: Any, module: nn.Module) -> Iterator[None]:
    """Replace the module whose forward pass the engine runs, in this context.

    DeepSpeed keeps it outside of the engine's registered modules. An assignment would register it, where
    releases before 0.19 do not find it: each access would recurse.
    """
    original = get_private(engine, "module")
    vars(engine)["module"] = module
    try:
        yield
    finally:
        vars(engine)["module"] = original


def report_invalid_norms(zero: Any) -> None:
    """Make the gradient norm Inf if that of a parameter group is NaN or Inf, so that the step is skipped.

    DeepSpeed replaces such a norm with -1, which versions before 0.19.8 combine with the other groups' norms to a
    finite one.
    """
    for name in ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload"):
        set_private(zero, name, _with_invalid_as_inf(get_private(zero, name)))


def _with_invalid_as_inf(get_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def get_checked_norm(*args: Any, **named: Any) -> Tensor:
        norm = get_norm(*args, **named)
        return norm.masked_fill(norm < 0, math.inf)

    return get_checked_norm


def skip_overflow_check(zero: Any) -> None:
    """Turn off the search of stages 1 and 2 for NaN and Inf, which the gradient norm makes superfluous.

    It took about 30 % of a step of GPT-2 124M on an H200.
    """
    set_private(zero, "check_grad_overflow", False)


def keep_until_reduced(zero: Any) -> None:
    """Keep the allocator from reusing a gradient's memory while stage 1 or 2 reduces it on a separate stream.

    DeepSpeed reduces a gradient that is larger than the bucket in place. If other ranks own the gradient, stage 2
    frees it as soon as the reduction is issued, and the allocator knows only the stream that allocated it
    (deepspeed 0.19.8, stage_1_and_2.py, which calls record_stream only for parts that this rank keeps).
    """
    if not get_private(zero, "overlap_comm") or (stream := get_private(zero, "reduction_stream")) is None:
        return
    average = get_private(zero, "average_tensor")

    def average_tensor(tensor: Tensor, *args: Any) -> None:
        """Average a buffer, and keep it until the reduction stream has read it."""
        tensor.record_stream(stream)
        average(tensor, *args)

    set_private(zero, "average_tensor", average_tensor)


def keep_unaligned_gradients(zero: Any) -> None:
    """Keep gradients in memory that DeepSpeed 0.19.8 cannot read back from files.

    It reads each parameter's gradient into one buffer for its group of parameters, at an address that need not be a
    multiple of the sector size (on three ranks, for example). Direct reads then fail, and DeepSpeed ignores the
    error: the optimizer would step with stale values.

    Args:
        zero: stage 3's optimizer, with the state of the optimizer in files.

    Raises:
        UserError: DeepSpeed has no `optimizer_swapper`, so gradients would be read from files unchecked.
    """
    swapper = get_private(zero, "optimizer_swapper")
    if swapper is None:
        raise missing_name_error(f"{type(zero).__name__}.optimizer_swapper")
    split = get_private(swapper, "_adjust_for_misaligned_lengths")
    alignment = get_private(swapper, "numel_alignment")

    def split_and_mark(tensors: list[Any], offsets: list[int]) -> tuple[list[Any], list[int]]:
        """Split gradients into parts, as DeepSpeed does, and mark those that must stay in memory."""
        parts, starts = split(tensors=tensors, offsets=offsets)
        for part, start in zip(parts, starts, strict=True):
            part.swappable = start % alignment == 0
        return parts, starts

    set_private(swapper, "_adjust_for_misaligned_lengths", split_and_mark)


@contextmanager
def smallest_file(size: int) -> Iterator[None]:
    """Set the minimum size in bytes of a tensor that DeepSpeed offloads to a file, in this context."""
    names = ("optimizer_utils", "partitioned_param_swapper")
    first, second = (importlib.import_module(f"deepspeed.runtime.swap_tensor.{name}") for name in names)
    with replaced_private(first, "MIN_AIO_BYTES", size), replaced_private(second, "MIN_AIO_BYTES", size):
        yield


def keep_second_shards(zero: Any) -> None:
    """Keep hpZ's second copies of shards after a step, as a fault of certify: passes would use old weights."""
    set_private(zero, "invalidate_secondary_tensor", lambda: None)
