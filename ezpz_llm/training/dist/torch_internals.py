"""Private names of torch. No other module may use them (tests/base/test_architecture.py).

All names except those of modules that are imported on use are looked up at import time. If a torch release has
renamed one, the run fails at startup with an error that gives the missing name, the installed version, and what to
install, instead of an AttributeError in the middle of a step.

Private names of DeepSpeed are in `deepspeed_names.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

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


def _get(owner: Any, kind: str, name: str) -> Any:
    """Return an attribute of an object of torch, which no class has.

    Raises:
        UserError: the object has no such attribute.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        raise _missing(kind, name) from None


def _missing(module: str, name: str) -> UserError:
    package = module.partition(".")[0]
    version = installed(package) or "of unknown version"
    return UserError(f"{package} {version} has no {module}.{name}, which ezpz_llm uses", where=sys.executable,
                     instead=f"pip install '{tested_range(package)}', the tested range of versions")


default_store = find("torch.distributed.distributed_c10d", "_get_default_store")
_world = find("torch.distributed.distributed_c10d", "_world")
for _name in ("pg_map", "pg_names"):
    find("torch.distributed.distributed_c10d", f"_world.{_name}")
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
for _name in ("Tensor._make_wrapper_subclass", "Tensor._base", "Tensor._version", "Tensor._is_view",
              "Tensor._backward_hooks", "Tensor._post_accumulate_grad_hooks", "ScriptObject._type",
              "ops.aten.add.Tensor._schema", "nn.Module._apply"):
    find("torch", _name)
for _name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
    _get(nn.Module(), "torch.nn.Module", _name)
BACKWARD_HOOKS, ACCUMULATION_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"
"""Attributes of a tensor with its hooks before and after the accumulation of its gradient."""
TENSOR_METADATA = frozenset({"_base", "_is_view", "_version", BACKWARD_HOOKS, ACCUMULATION_HOOKS})
"""Private attributes and methods of tensors that do not read or write values."""


class MovableModule(nn.Module):
    """Module with a method that runs after every change of its parameters by .to() or to_empty()."""

    def after_move(self) -> None:
        """Restore what the change broke, such as tied parameters: new tensors may replace the parameters."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MovableModule:
        super()._apply(fn, recurse)
        self.after_move()
        return self


def parameters_by_name(module: Any) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters, in the dictionary from which the module reads them."""
    parameters: dict[str, nn.Parameter | None] = module._parameters
    return parameters


def persistent_buffers(module: Any) -> list[str]:
    """Return the names of a module's own buffers that belong to its state_dict, also of those that are None."""
    return [name for name in module._buffers if name not in module._non_persistent_buffers_set]


def initialize_fsdp(module: Any) -> None:
    """Make a module the root of its fully_shard units, which torch does in its first forward pass."""
    state = _get(module, "torch.distributed.fsdp.FSDPModule", "_get_fsdp_state")()
    _get(state, "torch.distributed.fsdp.FSDPState", "_lazy_init")()


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, and any other tensor unchanged."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # without it, no DTensor exists
    if module is None or not issubclass(type(tensor), module.DTensor):
        return tensor
    shard: Tensor = _get(tensor, "torch.distributed.tensor.DTensor", "_local_tensor")
    return shard


def make_wrapper(kind: type[Any], like: Tensor) -> Any:
    """Create a tensor of a subclass, without storage, with the size, dtype, and device of `like`."""
    return Tensor._make_wrapper_subclass(kind, like.size(), dtype=like.dtype, device=like.device)


def viewed_tensor(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which a tensor is a view, or None."""
    return tensor._base


def write_count(tensor: Tensor) -> int:
    """Return the number of in-place changes of a tensor."""
    return tensor._version


def operator_schema(operator: Any) -> Any:
    """Return the schema of an operator that was passed to __torch_dispatch__."""
    return operator._schema


def script_type(value: torch.ScriptObject) -> str:
    """Return the name of the TorchScript type of an object, such as a process group in an operator's arguments."""
    return str(value._type())


def has_step_hooks(optimizer: Any) -> bool:
    """Return True if torch's constructor of optimizers has run."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def step_hooks(optimizer: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return a torch optimizer's hooks before and after a step, by id."""
    kind = "torch.optim.Optimizer"
    return _get(optimizer, kind, "_optimizer_step_pre_hooks"), _get(optimizer, kind, "_optimizer_step_post_hooks")


def supports_grad_scale(optimizer: Any) -> bool:
    """Return True if an optimizer's step divides by `grad_scale` and reads `found_inf`, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def live_groups() -> list[ProcessGroup]:
    """Return the process groups of this rank."""
    return list(_world.pg_map)


def count_groups() -> int:
    """Return the number of process groups that this rank knows, also those that it is not in."""
    return len(_world.pg_names)


_FLIGHT_RECORDERS = ("_dump_nccl_trace", "_dump_xccl_trace", "_dump_fr_trace")
"""Functions that return a pickled dump: of NCCL in builds for NVIDIA and AMD, of oneCCL, and of other backends."""


def dump_collectives() -> list[bytes]:
    """Return pickled dumps of this rank's flight recorders, without stacks; none if this torch has no recorder."""
    module = find("torch", "_C._distributed_c10d")
    return [getattr(module, name)(True, False, False) for name in _FLIGHT_RECORDERS if hasattr(module, name)]


def make_fake_store() -> Any:
    """Create the store for groups with the backend "fake"."""
    return find("torch.testing._internal.distributed.fake_pg", "FakeStore")()


def compile_times() -> dict[str, float]:
    """Return the seconds that torch.compile spent in each phase. Imports torch._dynamo, so call it only after a
    compilation."""
    return find("torch._dynamo.utils", "calculate_time_spent")()


def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """Compile a graph and its backward pass with inductor.

    In a torch without `force_non_lazy_backward_lowering`, the backward pass is compiled when it first runs.
    """
    config, name = "torch._functorch.config", "force_non_lazy_backward_lowering"
    patch = find(config, "patch")
    inductor: Callable[..., Any] = find("torch._dynamo", "lookup_backend")("inductor")
    with patch({name: True}) if hasattr(sys.modules[config], name) else contextlib.nullcontext():
        return inductor(graph, inputs)


def caches_graphs() -> bool:
    """Return True if inductor caches compiled graphs, as it does unless the user turns its cache off."""
    config = "torch._inductor.config"
    return bool(find(config, "fx_graph_cache") and not find(config, "force_disable_caches"))


def cache_lookups() -> tuple[int, int]:
    """Return how many graphs inductor has found in its cache in this process, and how many it has compiled."""
    counts = find("torch._dynamo.utils", "counters")["inductor"]
    return counts["fxgraph_cache_hit"], counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"]


def only_new_entries() -> AbstractContextManager[None]:
    """Return a context in which torch.compiler.save_cache_artifacts() omits the entries of earlier graphs."""
    manager = find("torch.compiler._cache", "CacheArtifactManager")
    fresh: Callable[[], AbstractContextManager[None]] = getattr(manager, "with_fresh_cache", contextlib.nullcontext)
    return fresh()
