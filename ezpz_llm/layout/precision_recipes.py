"""Precision recipes by name: what a run's parameters, products and reductions are rounded to (imports no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ezpz_llm.base import UserError, installed, unknown
from ezpz_llm.layout.deepspeed_versions import has_bf16
from ezpz_llm.layout.layout import Layout

Format = Literal["fp32", "tf32", "bf16", "fp16"]
"""What the factors of matrix products are rounded to."""


GradientDtype = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class GradientDtypes:
    """What gradients are added up in over micro-steps, and what they travel in when ranks average them.

    The default of every engine. In `bf16_autocast` and fp32 there is no other: gradients are of their parameters'
    dtype.
    """

    accumulated: GradientDtype = "fp32"
    reduced: GradientDtype = "fp32"


FP32_GRADIENTS = GradientDtypes()

@dataclass(frozen=True)
class PrecisionRecipe:
    """A named precision.

    `products` is the format of matrix products. With `autocast` parameters are fp32 and the forward pass casts
    them; without it parameters, activations and what travels are of the products' dtype, under fp32 master weights.
    """

    name: str
    products: Format
    autocast: bool = False

    @property
    def is_half(self) -> bool:
        """True if products are of two bytes."""
        return self.products in ("bf16", "fp16")

    @property
    def has_masters(self) -> bool:
        """True if the model's parameters are rounded copies of fp32 master weights."""
        return self.is_half and not self.autocast

    @property
    def scales_loss(self) -> bool:
        """True if gradients are kept in fp16's range by a dynamic loss scale."""
        return self.products == "fp16"


RECIPES = {recipe.name: recipe for recipe in (
    PrecisionRecipe("fp32", "fp32"), PrecisionRecipe("tf32", "tf32"),
    PrecisionRecipe("bf16", "bf16"), PrecisionRecipe("bf16_autocast", "bf16", autocast=True),
    PrecisionRecipe("fp16", "fp16"), PrecisionRecipe("fp16_autocast", "fp16", autocast=True))}
AUTOCAST = tuple(name for name, recipe in RECIPES.items() if recipe.autocast)
SCALED = tuple(name for name, recipe in RECIPES.items() if recipe.scales_loss)


def computed_as(layout: Layout, name: str) -> Layout:
    """The layout by whose settings DeepSpeed computes one in a recipe.

    In bf16 stage 1 is computed by stage 2's settings: with fp32 accumulation DeepSpeed 0.19 has another optimizer
    for stage 1, which keeps whole gradients in bf16 beside whole ones in fp32 and reduces them after the backward
    pass.
    """
    recipe = RECIPES.get(name)
    if recipe is not None and recipe.has_masters and layout.zero.stage == 1 and layout.pp == 1:
        return layout.with_zero(stage=2)
    return layout


def deepspeed_blocks(name: str, gradients: GradientDtypes) -> dict[str, Any]:
    """What DeepSpeed's configuration says of a recipe: nothing, where parameters are fp32 to it."""
    recipe = RECIPES.get(name)
    if recipe is None or not recipe.has_masters:
        return {}
    return {recipe.products: {"enabled": True}, "data_types": {"grad_accum_dtype": gradients.accumulated},
            "communication_data_type": gradients.reduced}


def has_masters(recipe: PrecisionRecipe, layout: Layout) -> bool:
    """True if the layout's engine has a recipe of parameters in two bytes."""
    if layout.engine == "deepspeed":
        # DeepSpeed's fp16 has a loss scale of its own, which is not one for all ranks.
        return bool(layout.zero.stage) and recipe.products == "bf16" and has_bf16(layout)
    return True


def check_engine(name: str | None, layout: Layout, where: str) -> None:
    """Refuse a recipe that the layout's engine does not have yet; None and "auto" are any engine's.

    Raises:
        UserError: names the engine and the recipe to take instead.
    """
    recipe = RECIPES.get(name or "")
    engine = "pipeline" if layout.pp > 1 else layout.engine
    if recipe is None or not recipe.has_masters or has_masters(recipe, layout):
        return
    if layout.zero.stage == 0 and layout.pp == 1:
        degrees = "".join(f" --{key} {size}" for key, size in (("tp", layout.tp), ("sp", layout.sp)) if size > 1)
        raise UserError(f"DeepSpeed's stage 0 does not add gradients of {name} in fp32", where=where,
                        instead=f"--ds-config ddp{degrees}, which does and shards as little, or "
                                f"--precision {name}_autocast")
    why = ": DeepSpeed's has a loss scale of its own" if engine == "deepspeed" and recipe.scales_loss else ""
    if recipe.products == "bf16":
        why = f" (deepspeed {installed('deepspeed')}; 0.19.8 has it)"
    raise UserError(f"engine {engine} has no {name} yet, parameters in {name} under fp32 master weights{why}",
                    where=where,
                    instead=f"--precision {name}_autocast: fp32 parameters, the forward pass in {name}")


def check_gradients(gradients: GradientDtypes, name: str | None, layout: Layout,
                    sources: Mapping[str, str]) -> None:
    """Refuse gradients in bf16 where the recipe or the layout's engine has none.

    Args:
        sources: where "grad_accum_dtype" and "reduce_dtype" came from.

    Raises:
        UserError: says why.
    """
    for key, dtype in (("grad_accum_dtype", gradients.accumulated), ("reduce_dtype", gradients.reduced)):
        if dtype not in get_args(GradientDtype):
            raise unknown("dtype of gradients", dtype, get_args(GradientDtype), where=f"{key} ({sources[key]})")
        why = None if dtype == "fp32" else _why_not_bf16(key, name, layout)
        if why is not None:
            raise UserError(f"{key} is bf16, and {why}", where=f"{key} ({sources[key]})",
                            instead="--precision bf16, or fp32" if name != "bf16" else "fp32")


def _why_not_bf16(key: str, name: str | None, layout: Layout) -> str | None:
    if name != "bf16":
        takes = "it is the device that chooses the precision" if name is None else f"the precision is {name}"
        return f"{takes}: gradients travel and are added in the dtype of their parameters, which must be bf16"
    if key == "reduce_dtype":
        return None
    if layout.engine == "ddp":
        return "ddp adds them to the gradients of the fp32 master weights, beside which a sum in bf16 saves nothing"
    if layout.engine == "fsdp2":
        return "fsdp2 adds what it has reduced to the gradients of its fp32 rows"
    if layout.pp > 1:
        return "DeepSpeed adds a pipeline's in one buffer in fp32"
    if layout.zero.offload_optimizer is not None:
        return "DeepSpeed adds offloaded gradients in fp32, in host memory"
    return None
