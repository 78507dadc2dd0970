"""Attention, by one of three kernels: torch's choice, the definition, or FlashAttention-3."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ezpz_llm.base import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

Attention = Literal["auto", "explicit", "flash3"]
"""The best for the shapes, see `best_attention`; by the definition, with all scores in memory, for comparison;
FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), from the module that it is installed as."""

_MODULE = "flash_attn_interface"
_LEAST_CONTEXT, _MOST_HEAD = 512, 256
"""Tokens from which on FlashAttention-3 is the faster one; the dimensions of a head that it knows."""


@dataclass(frozen=True)
class Surroundings:
    """What the choice of a kernel depends on besides the shapes.

    `capability` is the compute capability of an NVIDIA GPU, None for any other device. `can_activate`: this torch
    lets another flash kernel take its own's place. `installed`: FlashAttention-3 is.
    """

    capability: tuple[int, int] | None
    can_activate: bool
    installed: bool


def best_attention(there: Surroundings, *, half: bool, dropout: float, context: int, head_dim: int) -> Attention:
    """The kernel of a run that asks for none.

    FlashAttention-3 on a Hopper where somebody has built it, for the shapes that it computes. Anywhere else it is
    torch's choice, which on GPUs of compute capability 9.0 and 10.0 is cuDNN's kernel before its own flash
    attention, from the releases on that trust it (cuDNN 9.15; torch's sdp_utils.cpp, check_prefer_cudnn_attention).

    Args:
        half: products are in bf16 or fp16.
        context: tokens of a sequence.
    """
    is_hopper = there.capability is not None and there.capability[0] == 9
    has_flash3 = is_hopper and there.can_activate and there.installed
    fits = half and not dropout and context >= _LEAST_CONTEXT and head_dim % 8 == 0 and head_dim <= _MOST_HEAD
    return "flash3" if has_flash3 and fits else "auto"


def surroundings(device: torch.device) -> Surroundings:
    """Those of a device of this process."""
    import torch
    from torch.nn import attention

    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return Surroundings(torch.cuda.get_device_capability(device) if is_nvidia else None,
                        hasattr(attention, "activate_flash_attention_impl"),
                        importlib.util.find_spec(_MODULE) is not None)


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
        raise _refused(f"computes in bf16 and fp16, not in {precision}", "--precision bf16_autocast")
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

    there = surroundings(device)
    if there.capability is None or there.capability[0] != 9:
        raise _refused(f"needs a GPU of compute capability 9, a Hopper, which {device} is not")
    if not there.can_activate:
        raise _refused(f"cannot be taken in by torch {torch.__version__}", "a newer torch")
    attention.activate_flash_attention_impl("FA3")
    torch.backends.cuda.enable_cudnn_sdp(False)  # which torch would take first on a Hopper


def _refused(why: str, instead: str | None = None) -> UserError:
    return UserError(f"FlashAttention-3 {why}", where="--attention flash3",
                     instead=f"{instead}, or --attention auto" if instead else "--attention auto")
