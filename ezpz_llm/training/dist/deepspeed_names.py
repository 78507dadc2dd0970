"""Private names of DeepSpeed, and their lookup (imports neither DeepSpeed nor torch).

Only `deepspeed_patches.py` and `deepspeed_internals.py` may use the names (tests/base/test_architecture.py). A
release may remove any of them. Before ranks start, `training/layout/deepspeed_versions.py` checks that the
installed version has the names that a layout uses. Later, each use raises an error with the name of a missing
attribute.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ezpz_llm.core.base import UserError, installed, tested_range

NAMES: dict[str, dict[str, dict[str, str]]] = {
    "every layout": {
        "deepspeed.ops": {"__compatible_ops__": "turn off ops that are compiled with the first process group"},
        "deepspeed.comm.comm": {
            "comms_logger": "calls that DeepSpeed logged in the traced step",
            "configure": "turn the logger on and off"},
        "deepspeed.accelerator.abstract_accelerator": {
            "_communication_backend_name": "use the backend of torch's process group"},
        "deepspeed.utils.groups": {
            "mpu": "forget the model-parallel unit of an earlier engine",
            "_WORLD_GROUP": "forget the group of a destroyed world",
            "_ZERO_PARAM_INTRA_PARALLEL_GROUP": "use the mesh's group for hpZ",
            "_create_zero_param_parallel_group": "use the mesh's group for hpZ"},
        "deepspeed.runtime.pipe.module": {
            "PipelineParallelGrid": "use the mesh's groups",
            "dist.new_group": "use the mesh's groups"},
        "deepspeed.runtime.utils": {"tensor_model_parallel": "add each shard of a parameter to the norm"},
    },
    "ZeRO 1 and 2": {
        "deepspeed.runtime.zero.stage_1_and_2": {
            "_global_grad_norm": "decide whether to skip a step",
            "get_grad_norm_direct": "report a non-finite norm as Inf",
            "complete_grad_norm_calculation_for_cpu_offload": "report a non-finite norm as Inf",
            "override_loss_scale": "use ezpz_llm's loss scale",
            "check_grad_overflow": "skip DeepSpeed's search for NaN and Inf",
            "average_tensor": "keep a gradient until it is reduced",
            "overlap_comm": "keep a gradient until it is reduced",
            "reduction_stream": "keep a gradient until it is reduced",
            "averaged_gradients": "read and discard gradients",
            "all_grad_tensors": "discard gradients",
            "ipg_buckets": "measure buckets",
            "contiguous_gradients": "measure buckets",
            "bit16_groups": "map parameters to the flat buffer",
            "single_partition_of_fp32_groups": "read and write this rank's weights",
            "update_lp_params": "copy loaded weights to the parameters"},
        "deepspeed.utils.mixed_precision_linkage": {"_hp_mapping": "map parameters to the flat buffer"},
        "deepspeed.utils.tensor_fragment": {
            "lp_fragment_address": "map parameters to the flat buffer",
            "hp_fragment_address": "map parameters to the flat buffer"},
    },
    "ZeRO 3": {
        "deepspeed.runtime.zero.partition_parameters": {
            "ds_status": "recognize partitioned parameters",
            "ds_tensor": "read and write this rank's shard",
            "ds_secondary_tensor": "discard hpZ's copy of old weights",
            "ds_numel": "map parameters to shards",
            "ds_shape": "map parameters to shards",
            "partition_numel": "map parameters to shards",
            "partition": "partition initial weights",
            "local_device": "create parameters on the device",
            "_convert_to_deepspeed_param": "partition one parameter at a time"},
        "deepspeed.runtime.zero.stage3": {
            "_global_grad_norm": "decide whether to skip a step",
            "get_grad_norm_direct": "report a non-finite norm as Inf",
            "complete_grad_norm_calculation_for_cpu_offload": "report a non-finite norm as Inf",
            "override_loss_scale": "use ezpz_llm's loss scale",
            "averaged_gradients": "read gradients",
            "grad_partitions_flat_buffer": "set gradients to zero",
            "ipg_buckets": "measure buckets",
            "contiguous_gradients": "measure buckets",
            "fp16_groups": "map parameters to sub-groups",
            "sub_group_to_group_id": "map sub-groups to parameter groups",
            "fp32_partitioned_groups_flat": "read and write this rank's weights",
            "_swappable_optimizer_subgroup": "recognize sub-groups in files",
            "_optimizer_states_and_gradient_swap_in": "load the state of a sub-group",
            "_optimizer_states_and_gradient_swap_out": "write the state of a sub-group",
            "_reassign_or_swap_out_partitioned_parameters": "copy loaded weights to the shards",
            "checkpoint_event_prologue": "release gathered parameters",
            "checkpoint_event_epilogue": "gather the parameters that stay gathered",
            "invalidate_secondary_tensor": "injected fault of certify: keep hpZ's copy of old weights",
            "empty_partition_cache": "release gathered parameters after an evaluation"},
    },
    "pipelines": {
        "deepspeed.runtime.pipe.schedule": {
            "TrainSchedule": "list the instructions of a step",
            "num_pipe_buffers": "create the buffers of a step"},
        "deepspeed.runtime.pipe.p2p": {
            "dist.send": "send in a group of stages",
            "dist.recv": "receive in a group of stages"},
        "deepspeed.runtime.pipe.engine": {
            "_INSTRUCTION_MAP": "execute the schedule",
            "_reserve_pipe_buffers": "execute the schedule",
            "_compute_loss": "execute the schedule",
            "pipe_buffers": "read the targets of a micro-batch",
            "total_loss": "read the loss",
            "fwd_outputs": "discard the outputs of a step"},
        "deepspeed.runtime.bf16_optimizer": {
            "_global_grad_norm": "decide whether to skip a step",
            "bf16_groups": "map parameters to the flat buffer",
            "fp32_groups_flat_partition": "read and write this rank's weights",
            "non_expert_gradients": "average gradients in place",
            "update_lp_params": "copy loaded weights to the parameters",
            "_hp_grad": "sum the gradient of a tied embedding",
            "immediate_grad_update": "free bf16 gradients"},
    },
    "optimizer offload": {
        "deepspeed.ops.adam.cpu_adam": {
            "ds_opt_adam": "advance the step count of a resumed run",
            "opt_id": "advance the step count of a resumed run"},
    },
    "compiled ops": {
        "deepspeed.ops.op_builder.builder": {"_loaded_ops": "load ops without a compiler"},
    },
    "offload to NVMe": {
        "deepspeed.runtime.swap_tensor.optimizer_utils": {"MIN_AIO_BYTES": "certify files of small models"},
        "deepspeed.runtime.swap_tensor.partitioned_param_swapper": {
            "MIN_AIO_BYTES": "certify files of small models"},
    },
    "optimizer offload to NVMe": {
        "deepspeed.runtime.zero.stage3": {"optimizer_swapper": "keep unaligned gradients in memory"},
        "deepspeed.runtime.swap_tensor.optimizer_utils": {
            "_adjust_for_misaligned_lengths": "keep unaligned gradients in memory",
            "numel_alignment": "keep unaligned gradients in memory",
            "swappable": "keep unaligned gradients in memory"},
    },
}
"""Private names by the layouts that use them and by module, each with its purpose."""


def missing_name_error(name: str, user: str = "ezpz_llm") -> UserError:
    """Return the error for a name that DeepSpeed lacks, or for a missing DeepSpeed."""
    version, supported = installed("deepspeed"), tested_range("deepspeed")
    if version is None:
        return UserError("deepspeed is not installed in this Python", where=sys.executable,
                         instead=f"pip install '{supported}', or use --ds-config ddp or fsdp2")
    return UserError(f"deepspeed {version} has no {name}, which {user} uses", where=sys.executable,
                     instead=f"pip install '{supported}', the range that ezpz_llm is tested with")


def get_private(owner: Any, name: str) -> Any:
    """Return a private attribute of a module or object of DeepSpeed.

    Raises:
        UserError: DeepSpeed has no such attribute.
    """
    try:
        return getattr(owner, name)
    except AttributeError as error:
        kind = owner if isinstance(owner, ModuleType | type) else type(owner)
        raise missing_name_error(f"{kind.__name__}.{name}") from error


def set_private(owner: Any, name: str, value: Any) -> None:
    """Replace an existing attribute of DeepSpeed.

    Raises:
        UserError: DeepSpeed has no such attribute, so a new value would have no effect.
    """
    get_private(owner, name)
    setattr(owner, name, value)


@contextmanager
def replaced_private(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an existing attribute of DeepSpeed in this context."""
    original = get_private(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
