"""Layout support of the installed DeepSpeed (imports neither DeepSpeed nor torch).

`docs/evidence/versions.md` has the certificates. The engines use private names of DeepSpeed, which a release may
remove. `require_support` searches a module's source for each name as a whole word, which takes milliseconds and
also finds instance attributes.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from pathlib import Path

from ezpz_llm.core.base import UserError, installed, tested_range
from ezpz_llm.training.layout.layout import Layout

_EVERY_LAYOUT = {
    "deepspeed.ops": ["__compatible_ops__"],
    "deepspeed.comm.comm": ["comms_logger", "configure"],
    "deepspeed.accelerator.abstract_accelerator": ["_communication_backend_name"],
    "deepspeed.utils.groups": ["mpu", "_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
                               "_create_zero_param_parallel_group"],
    "deepspeed.runtime.pipe.module": ["PipelineParallelGrid", "dist.new_group"],
}
_STAGES_1_AND_2 = {
    "deepspeed.runtime.zero.stage_1_and_2": [
        "_global_grad_norm", "ipg_buckets", "averaged_gradients", "bit16_groups", "single_partition_of_fp32_groups",
        "update_lp_params", "override_loss_scale", "average_tensor", "overlap_comm", "reduction_stream",
        "check_grad_overflow", "get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload"],
    "deepspeed.utils.mixed_precision_linkage": ["_hp_mapping"],
    "deepspeed.utils.tensor_fragment": ["lp_fragment_address", "hp_fragment_address"],
}
_STAGE_3 = {
    "deepspeed.runtime.zero.partition_parameters": [
        "ds_tensor", "ds_secondary_tensor", "ds_numel", "ds_shape", "ds_status", "partition_numel", "local_device",
        "_convert_to_deepspeed_param"],
    "deepspeed.runtime.zero.stage3": [
        "_global_grad_norm", "get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload",
        "ipg_buckets", "grad_partitions_flat_buffer", "fp16_groups", "sub_group_to_group_id",
        "fp32_partitioned_groups_flat", "override_loss_scale", "_swappable_optimizer_subgroup",
        "_optimizer_states_and_gradient_swap_in", "_optimizer_states_and_gradient_swap_out",
        "_reassign_or_swap_out_partitioned_parameters", "checkpoint_event_prologue", "checkpoint_event_epilogue",
        "invalidate_secondary_tensor", "empty_partition_cache"],
}
_PIPELINE = {
    "deepspeed.runtime.pipe.schedule": ["TrainSchedule"],
    "deepspeed.runtime.pipe.p2p": ["dist.send", "dist.recv"],
    "deepspeed.runtime.pipe.engine": ["_INSTRUCTION_MAP", "_reserve_pipe_buffers", "_compute_loss", "pipe_buffers",
                                      "total_loss", "fwd_outputs"],
    "deepspeed.runtime.bf16_optimizer": [
        "_global_grad_norm", "bf16_groups", "fp32_groups_flat_partition",
        "non_expert_gradients", "update_lp_params", "_hp_grad", "immediate_grad_update"],
}
_OFFLOAD_OPTIMIZER = {
    "deepspeed.ops.adam.cpu_adam": ["ds_opt_adam", "opt_id"],
    "deepspeed.ops.op_builder.builder": ["_loaded_ops"],
}
_NVME = {
    "deepspeed.runtime.swap_tensor.optimizer_utils": ["MIN_AIO_BYTES"],
    "deepspeed.runtime.swap_tensor.partitioned_param_swapper": ["MIN_AIO_BYTES"],
}


def require_support(layout: Layout) -> None:
    """Check that the installed DeepSpeed trains correctly with this layout and has each name that its engine uses.

    Raises:
        UserError: DeepSpeed is not installed, trains incorrectly with this layout, or lacks a name.
    """
    if layout.pp > 1 and _is_older_than(0, 19):
        raise _incorrect_version_error(
            "divides gradients by the accumulation steps inconsistently across pipeline stages", layout, "0.19.8",
            "--ds-config zero1")
    if layout.zero.stage == 2 and _is_older_than(0, 18):
        raise _incorrect_version_error(
            "computes wrong gradients in ZeRO stage 2 (github.com/deepspeedai/DeepSpeed/issues/7718)", layout,
            "0.18.5", "--ds-config zero1")
    stage, is_pipeline = layout.zero.stage, layout.pp > 1
    offload_targets = layout.zero.offload_optimizer, layout.zero.offload_param
    for is_used, names in ((True, _EVERY_LAYOUT), (is_pipeline or stage in (1, 2), _STAGES_1_AND_2),
                           (stage == 3, _STAGE_3), (is_pipeline, _PIPELINE),
                           (layout.zero.offload_optimizer is not None, _OFFLOAD_OPTIMIZER),
                           ("nvme" in offload_targets, _NVME)):
        for module in names if is_used else ():
            source_words = _source_words(module)
            for name in names[module]:
                if not source_words.issuperset(name.split(".")):
                    raise _missing_name_error(f"{module}.{name}", layout)


def accumulates_bf16_in_fp32(layout: Layout) -> bool:
    """Return True if the installed DeepSpeed accumulates bf16 parameters' gradients in fp32 in this layout.

    Before 0.19, stages 1 and 2 accumulate partly in bf16 (0.18.5) or fail (0.17.6).
    """
    return layout.zero.stage == 3 or not _is_older_than(0, 19)


def _is_older_than(*release: int) -> bool:
    version = re.findall(r"\d+", installed("deepspeed") or "")
    return bool(version) and tuple(map(int, version[:2])) < release


def _incorrect_version_error(problem: str, layout: Layout, fixed_in: str, layout_option: str) -> UserError:
    return UserError(f"deepspeed {installed('deepspeed')} {problem}", where=f"layout {layout.name}",
                     instead=f"pip install 'deepspeed>={fixed_in},<0.20', or use {layout_option}")


@functools.cache
def _source_words(module: str) -> frozenset[str]:
    """Return the words in a module's source; none if there is no such module."""
    package, *names = module.split(".")
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder).joinpath(*names)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return frozenset(re.findall(r"\w+", file.read_text()))
    return frozenset()


def _missing_name_error(name: str, layout: Layout) -> UserError:
    version, supported = installed("deepspeed"), tested_range("deepspeed")
    if version is None:
        return UserError("deepspeed is not installed in this Python", where=sys.executable,
                         instead=f"pip install '{supported}', or use --ds-config ddp or fsdp2")
    return UserError(f"deepspeed {version} has no {name}, which layout {layout.name} uses", where=sys.executable,
                     instead=f"pip install '{supported}', the range that ezpz_llm is tested with")
