"""One precision recipe per dtype, the same in every engine.

fp32: parameters and arithmetic in fp32.
tf32: as fp32, with the factors of matrix products rounded to 10 bits of mantissa, which matrix units need.
bf16: parameters, activations and what travels of them in bfloat16; fp32 master weights and moments, to which the
optimizer's steps are made (engine/masters.py), and gradients that are added and reduced in fp32.
bf16_autocast: parameters, gradients, their reduction and the optimizer in fp32; the forward pass, and with it the
backward pass's matrix products, under torch.autocast in bfloat16.
fp16, fp16_autocast: the same with float16, and a dynamic loss scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ezpz_llm.base import UserError
from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.dist.private_names import cpu_has_amx, cpu_has_avx512_bf16
from ezpz_llm.layout.ds_config_blocks import DynamicScale
from ezpz_llm.layout.layout import Layout
from ezpz_llm.layout.precision_recipes import RECIPES, has_masters

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def product_dtype(precision: str) -> torch.dtype:
    """The dtype of a recipe's matrix products; fp32 for tf32, which is a setting of the process."""
    return _DTYPES.get(RECIPES[precision].products, torch.float32)


def gradient_dtype(name: str) -> torch.dtype:
    """The dtype of a name of `GradientDtypes`."""
    return _DTYPES.get(name, torch.float32)


def parameter_dtype(precision: str) -> torch.dtype:
    """The dtype of the parameters that a forward pass uses."""
    return product_dtype(precision) if RECIPES[precision].has_masters else torch.float32


def native_precision(device: torch.device, layout: Layout) -> str:
    """What "auto" means for a layout on a device that multiplies matrices in bf16; fp32 on another.

    On GPUs it is bf16, what other trainers run there, but bf16_autocast where the layout's engine has no bf16. CPUs
    stay at bf16_autocast: what bf16 costs them is not measured on one that has the units.
    """
    known = DEVICES[device.type].bf16
    if known != "yes" and not (known == "ask" and _BF16_UNITS[device.type]()):
        return "fp32"
    return "bf16" if device.type != "cpu" and has_masters(RECIPES["bf16"], layout) else "bf16_autocast"


_BF16_UNITS: dict[str, Callable[[], bool]] = {
    "cpu": lambda: cpu_has_avx512_bf16() or cpu_has_amx(),
    "cuda": lambda: torch.cuda.is_bf16_supported(including_emulation=False),
}
"""How devices are asked whose kind does not say it."""


def autocast_forward(module: nn.Module, device: torch.device, precision: str) -> None:
    """Let this module's forward pass run under the autocast of `precision`, if it has one, whoever calls it.

    The module's own `forward` is wrapped, and not the call to the engine: DeepSpeed's engine switches an autocast
    that surrounds it off, and evaluation calls the module without the engine.
    """
    if not RECIPES[precision].autocast:
        return
    dtype = product_dtype(precision)
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
                        where="precision", instead="--precision fp32, or bf16_autocast where the device has them")


def rounds_products(device: torch.device) -> bool:
    """True if an fp32 matrix product loses what TF32 has no bits for."""
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
                            "diverged", instead="--precision bf16_autocast, a lower --lr, or --grad-clip 1",
                            exit_code=1)
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
        """Scale, good steps in a row and overflows still tolerated, for a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps, "tolerated": self._tolerated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what `state_dict` gave; checkpoints of earlier versions have no `tolerated`."""
        self.scale, self.good_steps = state["scale"], state["good_steps"]
        self._tolerated = state.get("tolerated", self._settings.hysteresis - 1)
