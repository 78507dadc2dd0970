"""Uses of private names of DeepSpeed: weights, gradients, and shards of ZeRO, and the schedule of pipelines.

Written for DeepSpeed 0.19.8. No other module may use private names; patches are in `deepspeed_patches.py`. A
function raises a UserError with the name of an attribute that does not exist. This module imports neither DeepSpeed
nor torch.

In arguments, `engine` is a `deepspeed.DeepSpeedEngine`, and `zero` is the ZeRO optimizer that wraps the optimizer.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from ezpz_llm.training.dist.deepspeed_names import get_private, set_private

if TYPE_CHECKING:
    from torch import Tensor, nn


def loaded_ops() -> dict[str, ModuleType]:
    """Return DeepSpeed's table of loaded ops, by name. Its loader returns an op in this table without compiling."""
    builder = importlib.import_module("deepspeed.ops.op_builder.builder")
    ops: dict[str, ModuleType] = get_private(builder.OpBuilder, "_loaded_ops")
    return ops


def log_collectives(on: bool) -> dict[str, dict[str, float]]:
    """Turn DeepSpeed's communication logger on or off. Return the calls logged so far, by name, and reset it."""
    module: Any = sys.modules.get("deepspeed.comm.comm")
    if module is None:
        return {}
    logger = get_private(module, "comms_logger")
    calls = {name: {"count": sum(entry[0] for entry in sizes.values()),
                    "ms": sum(sum(entry[1]) for entry in sizes.values())}
             for name, sizes in logger.get_raw_data().items()}
    logger.reset_data()
    get_private(module, "configure")(enabled=on, prof_all=on, verbose=False)
    return calls


def mark_tensor_parallel(parameter: nn.Parameter, is_sharded: bool) -> None:
    """Mark a parameter as sharded over model-parallel ranks, or as replicated.

    DeepSpeed's norms include a marked parameter on every tensor-parallel rank, and any other parameter only on
    the first.
    """
    parameter.tensor_model_parallel = is_sharded


def is_marked_tensor_parallel(parameter: nn.Parameter) -> bool:
    """Return the mark of a parameter."""
    return bool(get_private(parameter, "tensor_model_parallel"))


def gradient_norm(zero: Any) -> Tensor | float:
    """Return the global gradient norm of the current step, which DeepSpeed computes before the optimizer step."""
    norm: Tensor | float = get_private(zero, "_global_grad_norm")
    return norm


def set_loss_scale(zero: Any, scale: Tensor | float) -> None:
    """Make backward passes multiply the loss by `scale`, and steps divide by it."""
    get_private(zero, "override_loss_scale")(scale)


def averaged_gradients(zero: Any, number: int) -> tuple[Tensor | None, Iterator[Tensor]]:
    """Return the averaged gradients of a parameter group: a flat buffer, if any, or else a tensor per parameter."""
    gradients = get_private(zero, "averaged_gradients")[number]
    return getattr(gradients, "flat_partition", None), iter(gradients)


def discard_averaged_gradients(zero: Any) -> None:
    """Discard the gradients that stages 1 and 2 have averaged since the last step."""
    get_private(zero, "all_grad_tensors").clear()
    get_private(zero, "averaged_gradients").clear()


def zero_partitioned_gradients(zero: Any) -> None:
    """Set stage 3's gradients to zero after a step, except those in files.

    DeepSpeed overwrites a gradient in the first micro-step of the next step, and with optimizer offload copies it
    in the last one. It keeps the old gradient of a parameter that the loss of this micro-step does not depend on.
    """
    get_private(zero, "grad_partitions_flat_buffer").zero_()
    for flat in get_private(zero, "fp32_partitioned_groups_flat"):
        if flat.grad is not None:
            flat.grad.zero_()


def gradient_storage(zero: Any) -> list[Any]:
    """Return the tensors outside `grad` that hold gradients; empty for other optimizers."""
    # Stages 1 and 2 keep gradients by group, in bf16 in DeepSpeed's own lists; stage 3 has one flat buffer.
    groups = [list(group or ()) for group in (getattr(zero, "averaged_gradients", None) or {}).values()]
    return [groups, getattr(zero, "grad_partitions_flat_buffer", None)]


def bucket_buffers(zero: Any) -> list[Any]:
    """Return the buffers of gradient buckets; stages 1 and 2 have them only during the backward pass."""
    if not getattr(zero, "contiguous_gradients", False):
        return []
    return [bucket.buffer for bucket in get_private(zero, "ipg_buckets").values()]


def partitioned_groups(zero: Any) -> tuple[list[list[nn.Parameter]], list[Tensor]]:
    """Return the parameters of each group of stages 1 and 2, and this rank's partition of their fp32 weights."""
    if hasattr(zero, "bf16_groups"):  # the optimizer of pipelines in bf16
        return zero.bf16_groups, get_private(zero, "fp32_groups_flat_partition")
    return get_private(zero, "bit16_groups"), get_private(zero, "single_partition_of_fp32_groups")


class Fragment(NamedTuple):
    """Part of a parameter in this rank's partition: its start in both, and the number of its elements."""

    start: int
    offset: int
    numel: int


def fragment_of(parameter: nn.Parameter) -> Fragment:
    """Return the part of a parameter that is in this rank's partition of stage 1 or 2; may be empty."""
    mapping = get_private(parameter, "_hp_mapping")
    if mapping is None:
        return Fragment(0, 0, 0)
    held = get_private(mapping, "hp_fragment_address")
    return Fragment(get_private(mapping, "lp_fragment_address").start, held.start, held.numel)


def refresh_parameters(zero: Any) -> None:
    """Copy the fp32 weights of stages 1 and 2 to the model's parameters."""
    get_private(zero, "update_lp_params")()


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Return True if stage 3 partitions a parameter."""
    return hasattr(parameter, "ds_status")


def is_gathered(parameter: nn.Parameter) -> bool:
    """Return True if a parameter that stage 3 partitions has all its elements."""
    return bool(get_private(parameter, "ds_status").name == "AVAILABLE")


def shard_of(parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of a parameter under stage 3, with padding; elsewhere the parameter."""
    shard: Tensor = get_private(parameter, "ds_tensor") if is_partitioned(parameter) else parameter
    return shard


def second_shard_of(parameter: nn.Parameter) -> Tensor | None:
    """Return hpZ's second copy of a shard, if any."""
    return getattr(parameter, "ds_secondary_tensor", None)


def discard_second_shard(parameter: nn.Parameter) -> None:
    """Discard hpZ's second copy of a shard, which has old or uninitialized weights.

    The first forward pass of every step creates it. DeepSpeed's invalidate_secondary_tensor omits frozen ones.
    """
    set_private(parameter, "ds_secondary_tensor", None)


def shard_numel(parameter: nn.Parameter) -> int:
    """Return the number of elements per rank of a parameter under stage 3, with padding."""
    return int(get_private(parameter, "partition_numel")())


def whole_numel(parameter: nn.Parameter) -> int:
    """Return the number of elements of a parameter under stage 3."""
    return int(get_private(parameter, "ds_numel"))


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of a parameter under stage 3."""
    return tuple(get_private(parameter, "ds_shape"))


def device_of_shards(init: Any) -> Any:
    """Return the device on which a `deepspeed.zero.Init` creates parameters."""
    return get_private(init, "local_device")


def convert_parameter(init: Any, parameter: nn.Parameter) -> None:
    """Make a parameter one of stage 3, still whole."""
    get_private(init, "_convert_to_deepspeed_param")(parameter)


def partition_parameter(parameter: nn.Parameter) -> None:
    """Keep only this rank's shard of a converted parameter."""
    get_private(parameter, "partition")()


def release_gathered(zero: Any) -> None:
    """Release the parameters that stage 3 has gathered."""
    get_private(zero, "empty_partition_cache")()


class SubGroup(NamedTuple):
    """Sub-group of stage 3: the number of its parameter group, its parameters, and this rank's fp32 weights."""

    group: int
    parameters: list[nn.Parameter]
    flat: Tensor


def sub_groups(zero: Any) -> list[SubGroup]:
    """Return the sub-groups of stage 3."""
    numbers, flats = get_private(zero, "sub_group_to_group_id"), get_private(zero, "fp32_partitioned_groups_flat")
    return [SubGroup(numbers[number], parameters, flats[number])
            for number, parameters in enumerate(get_private(zero, "fp16_groups"))]


def is_in_files(zero: Any, number: int) -> bool:
    """Return True if the optimizer state of a sub-group is in files."""
    return bool(get_private(zero, "_swappable_optimizer_subgroup")(number))


@contextmanager
def in_memory(zero: Any, number: int) -> Iterator[None]:
    """Load the optimizer state of a sub-group in this context, and write it to its files at exit."""
    if not is_in_files(zero, number):
        yield
        return
    get_private(zero, "_optimizer_states_and_gradient_swap_in")(number)
    try:
        yield
    finally:
        get_private(zero, "_optimizer_states_and_gradient_swap_out")(number)


def refresh_shards(zero: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Copy the fp32 weights of stage 3 to all shards of its parameters.

    As at the end of stage 3's step, release gathered parameters, write the shards, and gather the small parameters
    that are kept between steps.
    """
    get_private(zero, "checkpoint_event_prologue")()
    for parameter in parameters:
        discard_second_shard(parameter)
    for number in range(len(get_private(zero, "fp16_groups"))):
        with in_memory(zero, number):
            get_private(zero, "_reassign_or_swap_out_partitioned_parameters")(number)
    get_private(zero, "checkpoint_event_epilogue")()


def is_cpu_adam(optimizer: Any) -> bool:
    """Return True if an optimizer is DeepSpeed's C++ Adam."""
    return hasattr(optimizer, "ds_opt_adam")


def step_cpu_adam(optimizer: Any, step: int, group: dict[str, Any], tensors: list[Tensor]) -> None:
    """Run a step of DeepSpeed's C++ Adam with a learning rate of 0.

    Args:
        step: number of the step.
        tensors: weight, gradient, and both moments.
    """
    get_private(optimizer, "ds_opt_adam").adam_update(
        get_private(optimizer, "opt_id"), step, 0.0, *group["betas"], group["eps"], 0.0, group["bias_correction"],
        *tensors)


def prepare_pipeline(engine: Any, deepspeed: ModuleType, micro_batches: int, stages: int, stage: int) -> list[Any]:
    """Create the buffers of a pipeline engine. Return the instructions of a step, in order."""
    schedule = get_private(deepspeed.runtime.pipe.schedule, "TrainSchedule")(micro_batches, stages, stage)
    get_private(engine, "_reserve_pipe_buffers")(get_private(schedule, "num_pipe_buffers")())
    engine._compute_loss = True
    return [instruction for step in schedule for instruction in step]


def begin_pipeline_step(engine: Any) -> None:
    """Discard the loss and the outputs of the last step of a pipeline engine."""
    set_private(engine, "total_loss", None)
    engine.fwd_outputs = []


def execute_instruction(engine: Any, instruction: Any) -> None:
    """Execute an instruction of a pipeline's schedule."""
    get_private(engine, "_INSTRUCTION_MAP")[type(instruction)](engine, **instruction.kwargs)


def pipeline_labels(engine: Any) -> list[Tensor]:
    """Return the targets in the buffers of the last stage."""
    labels: list[Tensor] = get_private(engine, "pipe_buffers")["labels"]
    return labels


def pipeline_loss(engine: Any) -> Tensor:
    """Return the sum of the micro-batches' losses of the current step, on the last stage."""
    loss: Tensor = get_private(engine, "total_loss")
    return loss


def fp32_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the fp32 gradient of a bf16 parameter of a pipeline."""
    gradient: Tensor = get_private(parameter, "_hp_grad")
    return gradient


def flat_gradients(zero: Any) -> list[Tensor]:
    """Return the flat fp32 gradients of the whole stage of a bf16 pipeline, by parameter group."""
    gradients: list[Tensor] = get_private(zero, "non_expert_gradients")
    return gradients
