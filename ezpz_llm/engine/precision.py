"""One precision recipe per dtype, the same in every engine.

fp32: parameters and arithmetic in fp32.
tf32: as fp32, with the factors of matrix products rounded to 10 bits of mantissa, which matrix units need.
bf16: parameters, gradients, their reduction and the optimizer in fp32; the forward pass, and with it the backward
pass's matrix products, under torch.autocast in bfloat16.
fp16: as bf16 with float16, and a dynamic loss scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ezpz_llm.base.errors import UserError
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.dist.private_names import cpu_has_amx, cpu_has_avx512_bf16
from ezpz_llm.layout.ds_config_blocks import DynamicScale

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def native_precision(device: torch.device) -> str:
    """What "auto" means: bf16 on devices that multiply matrices in it, else fp32."""
    known = DEVICES[device.type].bf16
    return "bf16" if known == "yes" or (known == "ask" and _BF16_UNITS[device.type]()) else "fp32"


_BF16_UNITS: dict[str, Callable[[], bool]] = {
    "cpu": lambda: cpu_has_avx512_bf16() or cpu_has_amx(),
    "cuda": lambda: torch.cuda.is_bf16_supported(including_emulation=False),
}
"""How devices are asked whose kind does not say it."""


def autocast_forward(module: nn.Module, device: torch.device, precision: str) -> None:
    """Let this module's forward pass run in `precision` whoever calls it.

    The module's own `forward` is wrapped, and not the call to the engine: DeepSpeed's engine switches an autocast
    that surrounds it off, and evaluation calls the module without the engine.
    """
    if precision not in DTYPES:
        return
    dtype = DTYPES[precision]
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            return inner(*args, **kwargs)

    module.forward = forward


def set_products(device: torch.device, precision: str) -> None:
    """Let fp32 matrix products be TF32's or fp32's own, for all of this process, and see that they are.

    A setting that a device does not know is ignored there in silence.

    Raises:
        UserError: tf32 is asked for, and products are as exact as without it.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if precision == "tf32" and not rounds_products(device):
        raise UserError(f"tf32 has no effect on {device}: matrix products are as exact there as in fp32",
                        where="precision", instead="--precision fp32, or bf16 or fp16 where the device has them")


def rounds_products(device: torch.device) -> bool:
    """Whether an fp32 matrix product loses what TF32 has no bits for."""
    size = 512
    value = 1 + 2.0 ** -13
    product = torch.full((size, size), value, device=device) @ torch.eye(size, device=device)
    return bool((product != value).any())


class LossScale:
    """fp16's dynamic loss scale, which moves as DeepSpeed's does.

    Kept apart from DeepSpeed's and torch's because its verdict must be one for all ranks: it is taken on the global
    gradient norm, which every rank has, and not on the gradients a rank happens to hold. After Micikevicius et al.
    2018, arXiv:1710.03740.
    """

    FACTOR = 2.0

    def __init__(self, settings: DynamicScale) -> None:
        self._settings = settings
        self.scale = settings.start
        self.good_steps = -1  # a window begins after the first good step
        self._tolerated = settings.hysteresis - 1

    def update(self, finite: bool) -> None:
        """Lower the scale after an overflow, raise it after a window of steps without one.

        Raises:
            UserError: the gradients are not finite even under the lowest scale.
        """
        if finite:
            self._settle()
            return
        self.good_steps = -1
        if self._tolerated > 0:
            self._tolerated -= 1
            return
        if self.scale <= self._settings.least:
            raise UserError(f"fp16 gradients are not finite under a loss scale of {self.scale:g}: the loss has "
                            "diverged", instead="--precision bf16, a lower --lr, or --grad-clip 1", exit_code=1)
        self.scale = max(self.scale / self.FACTOR, self._settings.least)

    def _settle(self) -> None:
        self.good_steps += 1
        if self._settings.consecutive:
            self._tolerated = self._settings.hysteresis - 1
        if self.good_steps == self._settings.window:
            self.scale *= self.FACTOR
            self.good_steps = 0
            self._tolerated = self._settings.hysteresis - 1

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps, "tolerated": self._tolerated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.good_steps = state["scale"], state["good_steps"]
        self._tolerated = state.get("tolerated", self._settings.hysteresis - 1)
