"""Private names of torch and DeepSpeed, looked up here and nowhere else, when they are imported.

They have no promise of staying. Where a release has renamed one, a run ends at its start with what is gone, the
version that is installed and what to install, instead of an AttributeError in the middle of a step.
"""

from __future__ import annotations

import dis
import functools
import importlib
import importlib.metadata
import inspect
import sys
from types import CodeType
from typing import Any

from ezpz_llm.base import UserError, installed

_DEEPSPEED = {
    "deepspeed.ops": ["__compatible_ops__"],
    "deepspeed.ops.adam.cpu_adam": ["DeepSpeedCPUAdam.ds_opt_adam", "DeepSpeedCPUAdam.opt_id"],
    "deepspeed.ops.op_builder.builder": ["OpBuilder._loaded_ops"],
    "deepspeed.comm.comm": ["comms_logger", "configure"],
    "deepspeed.accelerator.abstract_accelerator": ["DeepSpeedAccelerator._communication_backend_name"],
    "deepspeed.utils.groups": ["mpu", "_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
                               "_create_zero_param_parallel_group"],
    "deepspeed.runtime.pipe.module": ["PipelineParallelGrid", "dist.new_group"],
    "deepspeed.runtime.pipe.schedule": ["TrainSchedule"],
    "deepspeed.runtime.pipe.p2p": ["dist.send", "dist.recv"],
    "deepspeed.runtime.pipe.engine": [
        "PipelineEngine._INSTRUCTION_MAP", "PipelineEngine._reserve_pipe_buffers", "PipelineEngine._compute_loss",
        "PipelineEngine.pipe_buffers", "PipelineEngine.total_loss", "PipelineEngine.fwd_outputs"],
    "deepspeed.runtime.swap_tensor.optimizer_utils": ["MIN_AIO_BYTES"],
    "deepspeed.runtime.swap_tensor.partitioned_param_swapper": ["MIN_AIO_BYTES"],
    "deepspeed.utils.mixed_precision_linkage": ["link_hp_params._hp_mapping"],
    "deepspeed.utils.tensor_fragment": ["tensor_fragment.lp_fragment_address",
                                        "tensor_fragment.hp_fragment_address"],
    "deepspeed.runtime.zero.partition_parameters": ["Init.ds_tensor", "Init.ds_secondary_tensor", "Init.ds_numel",
                                                      "Init.ds_shape", "Init.partition_numel",
                                                      "Init._convert_to_deepspeed_param", "Init.local_device",
                                                      "Init.ds_zero_partition_rank",
                                                      "Init.ds_zero_partition_world_size"],
    "deepspeed.runtime.zero.stage_1_and_2": [
        "DeepSpeedZeroOptimizer._global_grad_norm", "DeepSpeedZeroOptimizer.ipg_buckets",
        "DeepSpeedZeroOptimizer.averaged_gradients", "DeepSpeedZeroOptimizer.bit16_groups",
        "DeepSpeedZeroOptimizer.single_partition_of_fp32_groups", "DeepSpeedZeroOptimizer.update_lp_params",
        "DeepSpeedZeroOptimizer.override_loss_scale", "DeepSpeedZeroOptimizer.average_tensor",
        "DeepSpeedZeroOptimizer.overlap_comm", "DeepSpeedZeroOptimizer.reduction_stream"],
    "deepspeed.runtime.bf16_optimizer": [
        "see_memory_usage", *(f"BF16_Optimizer.{name}" for name in (
            "_global_grad_norm", "bf16_groups", "fp32_groups_flat_partition", "non_expert_gradients",
            "update_lp_params", "_hp_grad", "immediate_grad_update"))],
    "deepspeed.runtime.zero.stage3": [
        f"DeepSpeedZeroOptimizer_Stage3.{name}" for name in (
            "_global_grad_norm", "ipg_buckets", "grad_partitions_flat_buffer", "fp16_groups",
            "sub_group_to_group_id", "fp32_partitioned_groups_flat", "override_loss_scale",
            "_get_param_partition_rank", "_swappable_optimizer_subgroup", "_optimizer_states_and_gradient_swap_in",
            "_optimizer_states_and_gradient_swap_out", "_reassign_or_swap_out_partitioned_parameters",
            "checkpoint_event_prologue", "checkpoint_event_epilogue", "invalidate_secondary_tensor")],
}
"""By module. What only objects have is looked for in the code of their class, or of the function that sets it."""


def find(module: str, name: str) -> Any:
    """An attribute of a module, or of something in it.

    Raises:
        UserError: it is not there.
    """
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        raise _gone(module, name) from None
    return found


@functools.cache
def check_deepspeed() -> None:
    """Look for every private name of DeepSpeed that is used; import_deepspeed has imported their modules.

    Raises:
        UserError: the first that is not there.
    """
    for module, names in _DEEPSPEED.items():
        for name in names:
            owner, _, attribute = name.rpartition(".")
            if not owner or not _sets(find(module, owner), attribute):
                find(module, name)


def _sets(owner: Any, name: str) -> bool:
    """True if a function, or one of a class's, sets this attribute of an object."""
    values = [value for kind in inspect.getmro(owner) for value in vars(kind).values()] if isinstance(owner, type) \
        else [owner]
    return any(_sets_in(inspect.unwrap(value).__code__, name) for value in values if inspect.isfunction(value))


def _sets_in(code: CodeType, name: str) -> bool:
    if name in code.co_names and any(step.opname == "STORE_ATTR" and step.argval == name
                                     for step in dis.get_instructions(code)):
        return True
    return any(_sets_in(inner, name) for inner in code.co_consts if isinstance(inner, CodeType))


def _gone(module: str, name: str) -> UserError:
    package = module.partition(".")[0]
    version = installed(package) or "of unknown version"
    return UserError(f"{package} {version} has no {module}.{name}, which ezpz_llm uses", where=sys.executable,
                     instead=f"pip install '{_tested(package)}', the range that it is tested with")


def _tested(package: str) -> str:
    """What pyproject.toml asks for, as it was when this package was installed."""
    try:
        wanted = importlib.metadata.requires("ezpz_llm") or ()
    except importlib.metadata.PackageNotFoundError:
        wanted = ()
    return next((text for text in wanted if text.startswith(package)), package)


WORLD = find("torch.distributed.distributed_c10d", "_world")
FakeProcessGroup = find("torch._C._distributed_c10d", "FakeProcessGroup")
FakeTensor = find("torch._subclasses.fake_tensor", "FakeTensor")
TorchDispatchMode = find("torch.utils._python_dispatch", "TorchDispatchMode")
tree_leaves = find("torch.utils._pytree", "tree_leaves")
cpu_has_avx512_bf16 = find("torch.cpu", "_is_avx512_bf16_supported")
cpu_has_amx = find("torch.cpu", "_is_amx_tile_supported")
fused_attention_choice = find("torch", "_fused_sdp_choice")
softmax_backward = find("torch", "_softmax_backward_data")
foreach_norm, foreach_div_ = find("torch", "_foreach_norm"), find("torch", "_foreach_div_")
foreach_copy_ = find("torch", "_foreach_copy_")
for _name in ("_device_types", "_get_backend", "_register_backend", "BackendType"):
    find("torch.distributed", f"ProcessGroup.{_name}")
for _name in ("ScriptObject._type", "ops.aten.add.Tensor._schema"):
    find("torch", _name)


def compile_times() -> dict[str, float]:
    """torch.compile's account of its own seconds; its modules are loaded only by those who compile."""
    return find("torch._dynamo.utils", "calculate_time_spent")()
