"""Precision recipes: dtypes of parameters, matmuls and gradient reductions (imports no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ezpz_llm.core.base import UserError, installed, unknown_name_error
from ezpz_llm.training.layout.deepspeed_versions import accumulates_bf16_in_fp32
from ezpz_llm.training.layout.layout import Layout

Format = Literal["fp32", "tf32", "bf16", "fp16"]
"""Format to which the inputs of matmuls are rounded."""


GradientDtype = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class GradientDtypes:
    """Dtypes in which gradients are accumulated over micro-steps and reduced over ranks.

    fp32 is the default. Only recipe bf16 supports bf16.
    """

    accumulated: GradientDtype = "fp32"
    reduced: GradientDtype = "fp32"


FP32_GRADIENTS = GradientDtypes()

@dataclass(frozen=True)
class PrecisionRecipe:
    """Dtypes of parameters, activations and matmuls, under a name.

    `products` is the format of matmuls. With `autocast`, parameters are fp32 and the forward pass casts them.
    Without it, parameters and activations have the matmul dtype, with fp32 master weights. Gradients are reduced in
    `GradientDtypes.reduced`.
    """

    name: str
    products: Format
    autocast: bool = False

    @property
    def is_half(self) -> bool:
        """True if matmuls use a 2-byte dtype."""
        return self.products in ("bf16", "fp16")

    @property
    def has_masters(self) -> bool:
        """True if the model's parameters are rounded copies of fp32 master weights."""
        return self.is_half and not self.autocast

    @property
    def scales_loss(self) -> bool:
        """True if a dynamic loss scale keeps gradients in fp16's range."""
        return self.products == "fp16"


RECIPES = {recipe.name: recipe for recipe in (
    PrecisionRecipe("fp32", "fp32"), PrecisionRecipe("tf32", "tf32"),
    PrecisionRecipe("bf16", "bf16"), PrecisionRecipe("bf16_autocast", "bf16", autocast=True),
    PrecisionRecipe("fp16", "fp16"), PrecisionRecipe("fp16_autocast", "fp16", autocast=True))}
AUTOCAST = tuple(name for name, recipe in RECIPES.items() if recipe.autocast)
SCALED = tuple(name for name, recipe in RECIPES.items() if recipe.scales_loss)


def deepspeed_layout(layout: Layout, name: str) -> Layout:
    """Return the layout with which DeepSpeed is configured for this layout and recipe.

    In bf16, ZeRO stage 1 runs with the settings of stage 2. With fp32 accumulation, DeepSpeed 0.19 would use
    another optimizer for stage 1, which keeps all gradients in both bf16 and fp32 and reduces them after the
    backward pass.
    """
    recipe = RECIPES.get(name)
    if recipe is not None and recipe.has_masters and layout.zero.stage == 1 and layout.pp == 1:
        return layout.with_zero(stage=2)
    return layout


def deepspeed_entries(name: str, gradients: GradientDtypes) -> dict[str, Any]:
    """Return the entries of DeepSpeed's configuration for a recipe; empty if parameters are fp32."""
    recipe = RECIPES.get(name)
    if recipe is None or not recipe.has_masters:
        return {}
    return {recipe.products: {"enabled": True}, "data_types": {"grad_accum_dtype": gradients.accumulated},
            "communication_data_type": gradients.reduced}


def supports_masters(recipe: PrecisionRecipe, layout: Layout) -> bool:
    """Return True if the layout's engine supports this recipe's fp32 master weights."""
    if layout.engine == "deepspeed":
        # DeepSpeed's fp16 uses its own loss scale, which is not shared by all ranks.
        return bool(layout.zero.stage) and recipe.products == "bf16" and accumulates_bf16_in_fp32(layout)
    return True


def check_engine(name: str | None, layout: Layout, where: str) -> None:
    """Check that the layout's engine supports a recipe; None and "auto" always pass.

    Raises:
        UserError: the engine does not support it. The message names a supported recipe.
    """
    recipe = RECIPES.get(name or "")
    engine = "pipeline" if layout.pp > 1 else layout.engine
    if recipe is None or not recipe.has_masters or supports_masters(recipe, layout):
        return
    if layout.zero.stage == 0 and layout.pp == 1:
        degrees = "".join(f" --{key} {size}" for key, size in (("tp", layout.tp), ("sp", layout.sp)) if size > 1)
        raise UserError(f"DeepSpeed's stage 0 does not accumulate {name} gradients in fp32", where=where,
                        instead=f"--ds-config ddp{degrees}, which does so and also shards nothing, or "
                                f"--precision {name}_autocast")
    reason = (": DeepSpeed's fp16 loss scale is not shared by all ranks"
              if engine == "deepspeed" and recipe.scales_loss else "")
    if recipe.products == "bf16":
        reason = f" (deepspeed {installed('deepspeed')}; 0.19.8 supports it)"
    raise UserError(f"engine {engine} does not support {name} (with fp32 master weights) yet{reason}",
                    where=where,
                    instead=f"--precision {name}_autocast: fp32 parameters, forward pass in {name}")


def check_gradients(gradients: GradientDtypes, name: str | None, layout: Layout,
                    sources: Mapping[str, str]) -> None:
    """Check that the recipe and the layout's engine support the dtypes of gradients.

    Args:
        sources: source of "grad_accum_dtype" and "reduce_dtype".

    Raises:
        UserError: a dtype is unknown or unsupported.
    """
    for key, dtype in (("grad_accum_dtype", gradients.accumulated), ("reduce_dtype", gradients.reduced)):
        if dtype not in get_args(GradientDtype):
            raise unknown_name_error("gradient dtype", dtype, get_args(GradientDtype),
                                     where=f"{key} ({sources[key]})")
        reason = None if dtype == "fp32" else _reason_against_bf16(key, name, layout)
        if reason is not None:
            raise UserError(f"{key} is bf16, but {reason}", where=f"{key} ({sources[key]})",
                            instead=("--precision bf16, or " if name != "bf16" else "") + f"{key} fp32")


def _reason_against_bf16(key: str, name: str | None, layout: Layout) -> str | None:
    if name != "bf16":
        chosen = ("no precision is set, and the default depends on the device" if name is None
                  else f"the precision is {name}")
        return f"{chosen}: gradients have the dtype of their parameters, which must be bf16"
    if key == "reduce_dtype":
        return None
    if layout.engine == "ddp":
        return "ddp accumulates into gradients of the fp32 master weights, so bf16 would save no memory"
    if layout.engine == "fsdp2":
        return "fsdp2 accumulates reduced gradients into the gradients of its fp32 shards"
    if layout.pp > 1:
        return "DeepSpeed accumulates pipeline gradients in an fp32 buffer"
    if layout.zero.offload_optimizer is not None:
        return "DeepSpeed accumulates offloaded gradients in fp32 in CPU memory"
    return None
