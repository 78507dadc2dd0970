"""Traits of each kind of device, in one table (imports no torch).

The rest of the code asks for a trait, not which device it has. ROCm's devices are called cuda in torch, and RCCL
nccl: one row is for both. All of them have a fused AdamW, from torch 2.6 on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Traits:
    """Traits of a device type.

    `collectives` is torch's name of the backend that communicates between such devices. `own`: each rank takes one
    of its own, by its local rank; else all ranks of a host share it. `bound`: a process group is told its device
    ahead, so that it neither guesses nor waits for the first collective. `overlaps`: communication can run beside
    computation. `pins`: a copy from the host's pinned memory, and only from there, goes on beside the host.
    `parts`: a device may be a part of a card (a tile) and have the card's identity. `bf16`: whether it multiplies
    matrices in bfloat16, or has to be asked. `fp16`: whether it does in float16 at a useful speed. `tf32`: whether
    products of fp32 may be rounded to TF32; older devices of a kind do not, which a probe finds out. `float64`:
    whether it computes in it at all.
    """

    collectives: str
    own: bool = True
    bound: bool = False
    overlaps: bool = True
    pins: bool = True
    parts: bool = False
    bf16: Literal["yes", "no", "ask"] = "ask"
    fp16: bool = True
    tf32: bool = False
    float64: bool = True


DEVICES = {
    "cuda": Traits("nccl", bound=True, tf32=True),
    "xpu": Traits("xccl", parts=True, bf16="yes"),
    # One queue of commands: DeepSpeed has no streams there.
    "mps": Traits("gloo", own=False, overlaps=False, pins=False, bf16="no", float64=False),
    "cpu": Traits("gloo", own=False, overlaps=False, pins=False, fp16=False),
}
"""Traits by torch's name of the device type, in order of preference."""
