"""Private names of torch. No other module may use private names.

All names except that in `compile_times` are looked up at import time. If a torch release has renamed one, the run
fails at startup with an error that gives the missing name, the installed version, and what to install, instead of
an AttributeError in the middle of a step.

Private names of DeepSpeed are in `ezpz_llm.training.layout.deepspeed_versions`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ezpz_llm.core.base import UserError, installed, tested_range


def find(module: str, name: str) -> Any:
    """Import a module and return the attribute at a dotted path in it.

    Raises:
        UserError: the module cannot be imported, or has no such attribute.
    """
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        raise _missing(module, name) from None
    return value


def _missing(module: str, name: str) -> UserError:
    package = module.partition(".")[0]
    version = installed(package) or "of unknown version"
    return UserError(f"{package} {version} has no {module}.{name}, which ezpz_llm uses", where=sys.executable,
                     instead=f"pip install '{tested_range(package)}', the tested range of versions")


default_store = find("torch.distributed.distributed_c10d", "_get_default_store")
WORLD = find("torch.distributed.distributed_c10d", "_world")
FakeTensor = find("torch._subclasses.fake_tensor", "FakeTensor")
TorchDispatchMode = find("torch.utils._python_dispatch", "TorchDispatchMode")
plain_functions = find("torch._C", "DisableTorchFunctionSubclass")
tree_leaves = find("torch.utils._pytree", "tree_leaves")
tree_map = find("torch.utils._pytree", "tree_map")
cpu_has_avx512_bf16 = find("torch.cpu", "_is_avx512_bf16_supported")
cpu_has_amx = find("torch.cpu", "_is_amx_tile_supported")
fused_attention_choice = find("torch", "_fused_sdp_choice")
softmax_backward = find("torch", "_softmax_backward_data")
foreach_norm, foreach_div_ = find("torch", "_foreach_norm"), find("torch", "_foreach_div_")
foreach_copy_, foreach_mul_ = find("torch", "_foreach_copy_"), find("torch", "_foreach_mul_")
for _name in ("Tensor._make_wrapper_subclass", "ScriptObject._type", "Tensor._base", "ops.aten.add.Tensor._schema"):
    find("torch", _name)


def persistent_buffers(module: Any) -> list[str]:
    """Return the names of a module's own buffers that belong to its state_dict, also of those that are None."""
    return [name for name in module._buffers if name not in module._non_persistent_buffers_set]


def initialize_fsdp(module: Any) -> None:
    """Make a module the root of its fully_shard units, which torch does in its first forward pass."""
    module._get_fsdp_state()._lazy_init()


def step_hooks(optimizer: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return a torch optimizer's hooks before and after a step, by id."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def compile_times() -> dict[str, float]:
    """Return the seconds that torch.compile spent in each phase. Imports torch._dynamo, so call it only after a
    compilation."""
    return find("torch._dynamo.utils", "calculate_time_spent")()
