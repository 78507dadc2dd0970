"""Which kernel computes attention: torch's choice, the definition, or FlashAttention-3."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Literal

from ezpz_llm.base.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

Attention = Literal["auto", "explicit", "flash3"]
"""What torch chooses for the shapes; by the definition, with all scores in memory, for comparison; FlashAttention-3
(Shah et al. 2024, arXiv:2407.08608), from the module that it is installed as."""

_MODULE = "flash_attn_interface"


def check_attention(attention: Attention, device: str, precision: str, dropout: float) -> None:
    """Refuse a kernel that cannot run (imports no torch).

    Args:
        device: "cuda", "cpu" and so on, "auto" where it is not known yet; `precision` likewise.

    Raises:
        UserError: says why.
    """
    if attention != "flash3":
        return
    if device not in ("cuda", "auto"):
        raise _refused(f"computes on NVIDIA GPUs, not on {device}")
    if precision in ("fp32", "tf32"):
        raise _refused(f"computes in bf16 and fp16, not in {precision}", "--precision bf16")
    if dropout:
        raise _refused(f"has no dropout inside, and the model's is {dropout:g}", "--dropout 0")
    if importlib.util.find_spec(_MODULE) is None:
        raise _refused(f"is not installed: there is no module {_MODULE}",
                       "build it from the folder hopper of github.com/Dao-AILab/flash-attention")


def use_attention(model: nn.Module, attention: Attention, device: torch.device) -> None:
    """Let a model's attention be computed so; flash3 then holds for all of this process.

    Raises:
        UserError: this torch or this device has no FlashAttention-3.
    """
    from ezpz_llm.model.gpt import CausalProduct

    for module in model.modules():
        if isinstance(module, CausalProduct):
            module.explicit = attention == "explicit"
    if attention == "flash3":
        _activate_flash3(device)


def _activate_flash3(device: torch.device) -> None:
    import torch
    from torch.nn import attention

    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device)[0] != 9:
        raise _refused(f"needs a GPU of compute capability 9, a Hopper, which {device} is not")
    if not hasattr(attention, "activate_flash_attention_impl"):
        raise _refused(f"cannot be taken in by torch {torch.__version__}", "a newer torch")
    attention.activate_flash_attention_impl("FA3")


def _refused(why: str, instead: str | None = None) -> UserError:
    return UserError(f"FlashAttention-3 {why}", where="--attention flash3",
                     instead=f"{instead}, or --attention auto" if instead else "--attention auto")
