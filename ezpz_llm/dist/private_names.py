"""Private names of torch, looked up here and nowhere else, when this module is imported.

They have no promise of staying. Where a release has renamed one, a run ends at its start with what is gone, the
version that is installed and what to install, instead of an AttributeError in the middle of a step. Those of
DeepSpeed are in `ezpz_llm.layout.deepspeed_versions`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ezpz_llm.base import UserError, installed, tested_range


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


def _gone(module: str, name: str) -> UserError:
    package = module.partition(".")[0]
    version = installed(package) or "of unknown version"
    return UserError(f"{package} {version} has no {module}.{name}, which ezpz_llm uses", where=sys.executable,
                     instead=f"pip install '{tested_range(package)}', the range that it is tested with")


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
