"""Precision recipes, the same in every engine.

fp32: parameters and arithmetic in fp32.
tf32: as fp32, with the factors of matmuls rounded to 10 mantissa bits on tensor cores.
bf16: parameters, activations and their communication in bfloat16; the optimizer steps fp32 master weights and
moments (training/engine/masters.py); gradients are accumulated and reduced in fp32, or on request in bf16.
bf16_autocast: parameters, gradients, gradient reduction and optimizer in fp32; the forward pass, and thus the
matmuls of the backward pass, under torch.autocast in bfloat16.
fp16, fp16_autocast: the same with float16 and a dynamic loss scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.torch_internals import cpu_has_amx, cpu_has_avx512_bf16
from ezpz_llm.training.engine.loss_scale_state import LossScaleState
from ezpz_llm.training.layout.ds_config_blocks import DynamicScale
from ezpz_llm.training.layout.layout import Layout
from ezpz_llm.training.layout.precision_recipes import RECIPES, supports_masters

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def matmul_dtype(precision: str) -> torch.dtype:
    """Return the dtype of a recipe's matmuls; fp32 for tf32, which is a setting of the process."""
    return _DTYPES.get(RECIPES[precision].products, torch.float32)


def gradient_dtype(name: str) -> torch.dtype:
    """Return the dtype for a name in `GradientDtypes`."""
    return _DTYPES.get(name, torch.float32)


def parameter_dtype(precision: str) -> torch.dtype:
    """Return the dtype of the parameters in a forward pass."""
    return matmul_dtype(precision) if RECIPES[precision].has_masters else torch.float32


def native_precision(device: torch.device, layout: Layout) -> str:
    """Return the precision for "auto": bf16, bf16_autocast, or fp32.

    Devices without bf16 matmuls use fp32, and layouts whose engine does not support bf16 use bf16_autocast. On
    CPUs, both have the same speed (benchmarks/README.md, 2026-11-27).
    """
    support = DEVICES[device.type].bf16
    if support != "yes" and not (support == "ask" and _BF16_UNITS[device.type]()):
        return "fp32"
    return "bf16" if supports_masters(RECIPES["bf16"], layout) else "bf16_autocast"


_BF16_UNITS: dict[str, Callable[[], bool]] = {
    "cpu": lambda: cpu_has_avx512_bf16() or cpu_has_amx(),
    "cuda": lambda: torch.cuda.is_bf16_supported(including_emulation=False),
}
"""Checks for bf16 units by device type, for types of which only some devices have them."""


def autocast_forward(module: nn.Module, device: torch.device, precision: str) -> None:
    """Wrap the module's `forward` in autocast, if `precision` uses it.

    Wraps the module instead of calls to the engine, because DeepSpeed's engine disables a surrounding autocast, and
    evaluation calls the module without the engine.
    """
    if not RECIPES[precision].autocast:
        return
    dtype = matmul_dtype(precision)
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            return inner(*args, **kwargs)

    module.forward = forward


def set_tf32(device: torch.device, precision: str) -> None:
    """Enable or disable TF32 matmuls for this process, and check that the setting has an effect.

    Devices without TF32 silently ignore the setting.

    Raises:
        UserError: tf32 is requested, but matmuls are as precise as without it.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if precision == "tf32" and not rounds_matmuls(device):
        raise UserError(f"tf32 has no effect on {device}: its matmuls are as precise as in fp32",
                        where="precision",
                        instead="use --precision fp32, or bf16_autocast if the device has bf16 units")


def rounds_matmuls(device: torch.device) -> bool:
    """Return True if an fp32 matmul rounds its factors to TF32."""
    size = 512
    value = 1 + 2.0 ** -13
    product = torch.full((size, size), value, device=device) @ torch.eye(size, device=device)
    return bool((product != value).any())


class LossScale:
    """Dynamic loss scale of fp16, with the same updates as in DeepSpeed.

    This class replaces DeepSpeed's and torch's loss scales, because all ranks must make the same decision: it
    uses the global gradient norm, which every rank has, instead of the gradients on this rank. See Micikevicius et
    al. 2018, arXiv:1710.03740.
    """

    FACTOR = 2.0

    def __init__(self, settings: DynamicScale) -> None:
        self._settings = settings
        self.scale = settings.start
        self.good_steps = -1  # a window starts after the first good step
        self._tolerated = settings.hysteresis - 1

    def update(self, finite: bool) -> None:
        """Lower the scale after an overflow; raise it after a window of steps without overflow.

        Raises:
            UserError: gradients are non-finite even with the lowest scale.
        """
        if finite:
            self._count_good_step()
            return
        self.good_steps = -1
        if self._tolerated > 0:
            self._tolerated -= 1
            return
        if self.scale <= self._settings.least:
            raise UserError(f"fp16 gradients are non-finite with a loss scale of {self.scale:g}: the loss has "
                            "diverged", instead="use --precision bf16_autocast, a lower --lr, or --grad-clip 1",
                            exit_code=1)
        self.scale = max(self.scale / self.FACTOR, self._settings.least)

    def _count_good_step(self) -> None:
        self.good_steps += 1
        if self._settings.consecutive:
            self._tolerated = self._settings.hysteresis - 1
        if self.good_steps == self._settings.window:
            self.scale *= self.FACTOR
            self.good_steps = 0
            self._tolerated = self._settings.hysteresis - 1

    def state(self) -> LossScaleState:
        """Return the state for a checkpoint."""
        return LossScaleState(self.scale, self.good_steps, self._tolerated)

    def restore(self, state: LossScaleState) -> None:
        """Restore the state from `state`."""
        self.scale, self.good_steps, self._tolerated = state.scale, state.good_steps, state.tolerated
