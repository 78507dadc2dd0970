"""Choice of the attention kernel: torch's choice, an explicit computation of all scores, or FlashAttention-3."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ezpz_llm.core.base import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

Attention = Literal["auto", "explicit", "flash3"]
"""Attention kernels: "auto" lets torch choose; as the value of --attention, it is first replaced by the choice of
`best_attention`. "explicit" computes and stores all scores, for comparison; "flash3" is FlashAttention-3
(Shah et al. 2024, arXiv:2407.08608)."""

_MODULE = "flash_attn_interface"
_MIN_CONTEXT, _MAX_HEAD_DIM = 512, 256
"""Context length from which FlashAttention-3 is faster than torch's kernels, and its maximum head dimension."""


@dataclass(frozen=True)
class AttentionEnvironment:
    """Properties of the device and the installation that determine the choice of a kernel.

    Attributes:
        capability: compute capability of an NVIDIA GPU; None for other devices.
        can_activate: True if this torch can replace its flash kernel.
        installed: True if FlashAttention-3 is installed.
    """

    capability: tuple[int, int] | None
    can_activate: bool
    installed: bool


def best_attention(environment: AttentionEnvironment, *, half: bool, dropout: float, context: int,
                   head_dim: int, masked: bool) -> Attention:
    """Return the kernel for --attention auto.

    This is FlashAttention-3 on Hopper GPUs if it is installed, supports the dtype, dropout, head dimension and
    mask, and is faster at this context length; otherwise torch's choice. On GPUs with compute capability 9.0 and
    10.0, with cuDNN 9.15 or later, torch prefers cuDNN's kernel to its own flash attention (torch's sdp_utils.cpp,
    check_prefer_cudnn_attention).

    Args:
        half: True if matmuls are in bf16 or fp16.
        context: tokens in a sequence.
        masked: True with masks between documents.
    """
    is_hopper = environment.capability is not None and environment.capability[0] == 9
    has_flash3 = is_hopper and environment.can_activate and environment.installed
    is_supported = half and not dropout and not masked and head_dim % 8 == 0 and head_dim <= _MAX_HEAD_DIM
    return "flash3" if has_flash3 and is_supported and context >= _MIN_CONTEXT else "auto"


def read_environment(device: torch.device) -> AttentionEnvironment:
    """Return the `AttentionEnvironment` of a device."""
    import torch
    from torch.nn import attention

    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return AttentionEnvironment(torch.cuda.get_device_capability(device) if is_nvidia else None,
                                hasattr(attention, "activate_flash_attention_impl"),
                                importlib.util.find_spec(_MODULE) is not None)


def check_attention(attention: Attention, device: str, precision: str, dropout: float, masked: bool) -> None:
    """Reject a kernel that cannot run (imports no torch).

    Args:
        device: device type, such as "cuda"; "auto" if not known yet.
        precision: precision recipe; "auto" if not known yet.
        masked: True with masks between documents.

    Raises:
        UserError: the kernel is not installed, or does not support the device, precision, dropout or masks.
    """
    if attention != "flash3":
        return
    if device not in ("cuda", "auto"):
        raise _unsupported(f"runs on NVIDIA GPUs, not on {device}")
    if precision in ("fp32", "tf32"):
        raise _unsupported(f"supports bf16 and fp16, not {precision}", "use --precision bf16_autocast")
    if dropout:
        raise _unsupported(f"does not support dropout, but the model's dropout is {dropout:g}", "use --dropout 0")
    if masked:
        raise _unsupported("does not support masks between documents", "use --mask-documents false")
    if importlib.util.find_spec(_MODULE) is None:
        raise _unsupported(f"is not installed: there is no module {_MODULE}",
                           "build it from the hopper/ folder of github.com/Dao-AILab/flash-attention")


def use_attention(model: nn.Module, attention: Attention, device: torch.device) -> None:
    """Make a model use an attention kernel; flash3 applies to the whole process.

    Raises:
        UserError: this torch or this device does not support FlashAttention-3.
    """
    from ezpz_llm.training.model.gpt import CausalProduct

    for module in model.modules():
        if isinstance(module, CausalProduct):
            module.explicit = attention == "explicit"
    if attention == "flash3":
        _activate_flash3(device)


def _activate_flash3(device: torch.device) -> None:
    import torch
    from torch.nn import attention

    support = read_environment(device)
    if support.capability is None or support.capability[0] != 9:
        raise _unsupported(f"requires a Hopper GPU (compute capability 9), but {device} is not one")
    if not support.can_activate:
        raise _unsupported(f"is not supported by torch {torch.__version__}", "upgrade torch")
    attention.activate_flash_attention_impl("FA3")
    torch.backends.cuda.enable_cudnn_sdp(False)  # on Hopper, torch would prefer cuDNN's kernel


def _unsupported(reason: str, instead: str | None = None) -> UserError:
    return UserError(f"FlashAttention-3 {reason}", where="--attention flash3",
                     instead=f"{instead}, or use --attention auto" if instead else "use --attention auto")
