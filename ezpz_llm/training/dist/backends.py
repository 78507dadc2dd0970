"""Table of the traits of each device type (does not import torch).

Other code should test a trait, not the device type. In torch, ROCm devices are called cuda and RCCL is called nccl,
so that one row covers both vendors. Every device type has a fused AdamW from torch 2.6 on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class _Traits:
    """Traits of a device type.

    Attributes:
        collectives: torch's name of the communication backend.
        own: each rank uses its own device, selected by local rank. If False, all ranks of a node share one.
        bound: process groups are created with `device_id`, so that they do not guess the device, and create
            communicators at once instead of in the first collective.
        averages: the backend's average of a reduction is correct. If not, sum and divide.
        masked_attention: torch has a fused attention kernel with masks and gradients.
        exact_all_to_all: all-to-all returns the right values. If False, sequence parallelism checks it first.
        overlaps: communication can overlap with computation.
        pins: copies to the device can be asynchronous, but only from pinned CPU memory.
        parts: a device may be a part of a card (a tile) that reports the card's UUID.
        bf16: support for bfloat16 matmuls; "ask" means that it depends on the device.
        fp16: float16 matmuls run at a useful speed.
        tf32: fp32 matmuls may be rounded to TF32. Older devices of the type do not support it, so probe the device.
        float64: float64 is supported.
    """

    collectives: str
    own: bool = True
    bound: bool = False
    averages: bool = False
    masked_attention: bool = True
    exact_all_to_all: bool = True
    overlaps: bool = True
    pins: bool = True
    parts: bool = False
    bf16: Literal["yes", "no", "ask"] = "ask"
    fp16: bool = True
    tf32: bool = False
    float64: bool = True


DEVICES = {
    "cuda": _Traits("nccl", bound=True, averages=True, tf32=True),
    # oneCCL's average raises an error or divides twice (github.com/intel/torch-xpu-ops issues 2361 and 3020,
    # github.com/uxlfoundation/oneCCL issue 195); its all-to-all returned wrong data (torch-xpu-ops issue 3021).
    # With a mask, torch 2.11 computes all scores on Intel GPUs (torch-xpu-ops issue 2390).
    "xpu": _Traits("xccl", masked_attention=False, exact_all_to_all=False, parts=True, bf16="yes"),
    # overlaps=False: there is a single command queue, and DeepSpeed has no streams for MPS.
    "mps": _Traits("gloo", own=False, overlaps=False, pins=False, bf16="no", float64=False),
    # gloo's average is a sum in some versions of torch (github.com/pytorch/pytorch/issues/162338).
    "cpu": _Traits("gloo", own=False, overlaps=False, pins=False, fp16=False),
}
"""Traits by torch device type, in order of preference."""
