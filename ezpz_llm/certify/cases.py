"""Cases to certify: a layout with a model, a precision and a world size each (imports no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ezpz_llm.base.errors import UserError
from ezpz_llm.certify import recipe
from ezpz_llm.layout import ds_config
from ezpz_llm.layout.layout import Layout, read_layout
from ezpz_llm.layout.resolve import Resolved, resolve

_DP_SIZES = (1, 2, 4)
_MOST_RANKS = 4
_WORLDS = {"3d": (8,)}
"""World sizes that the degrees of a ds_config do not say: the third dimension of 3d is data-parallel."""


@dataclass(frozen=True)
class Case:
    """One layout with one model in one precision on one number of ranks, perhaps with an injected fault."""

    layout: str
    world: int
    model: str
    dtype: str
    fault: str | None = None

    @property
    def title(self) -> str:
        fault = f" with {self.fault}" if self.fault else ""
        return f"{self.layout} {self.model} {self.dtype} on {self.world} rank{'s' * (self.world > 1)}{fault}"


@dataclass(frozen=True)
class Skipped:
    """A case that cannot run, and why; `illegal` where no machine could run it, else there is something to type."""

    case: Case
    reason: str
    illegal: bool


def layout_of(name: str) -> Layout:
    """The layout of a ds_config, by name or path."""
    return read_layout(ds_config.load(name))


def natural_worlds(name: str) -> tuple[int, ...]:
    """The worlds of up to four ranks in which a layout has one, two or four data-parallel ranks; 3d's is eight."""
    layout = layout_of(name)
    others = layout.tp * layout.pp * layout.sp
    return _WORLDS.get(layout.name) or tuple(others * size for size in _DP_SIZES if others * size <= _MOST_RANKS)


def resolve_case(case: Case, device: str | None) -> Resolved:
    """The case's layout with the recipe's numbers.

    Raises:
        UserError: it cannot run.
    """
    pipeline = layout_of(case.layout).pp > 1
    resolved = resolve(case.layout, world_size=case.world, global_batch=recipe.GLOBAL_BATCH, clip=recipe.CLIP,
                       accumulation=recipe.PIPELINE_ACCUMULATION if pipeline else recipe.ACCUMULATION,
                       precision=case.dtype, device=device, model=recipe.model_config(case.model))
    if resolved.deepspeed is None:
        return resolved
    zero = resolved.deepspeed["zero_optimization"]
    scaled = {key: min(zero.get(key, most), most) for key, most in recipe.SCALED.items()
              if resolved.layout.zero.stage == 3 or (key.endswith("bucket_size") and not key.startswith("stage3"))}
    deepspeed = {**resolved.deepspeed, "zero_optimization": {**zero, **scaled}}
    if "aio" in deepspeed:
        deepspeed["aio"] = {**deepspeed["aio"], "block_size": recipe.SMALLEST_FILE}
    return replace(resolved, deepspeed=deepspeed)


def all_cases(layouts: Sequence[str], worlds: Sequence[int] | None, models: Sequence[str],
              dtypes: Sequence[str]) -> list[Case]:
    """Every combination, by world; each layout in its natural worlds where none are asked for."""
    cases = [Case(layout, world, model, dtype) for layout in layouts
             for world in worlds or natural_worlds(layout) for model in models for dtype in dtypes]
    return sorted(cases, key=lambda case: case.world)


def quick_cases(layouts: Sequence[str], worlds: Sequence[int] | None, models: Sequence[str],
                dtypes: Sequence[str]) -> list[Case]:
    """Each layout once in the first precision, in its smallest world of several ranks (of those asked for, if any),
    the models in turn; and two in the other precisions."""
    cases = []
    for number, layout in enumerate(layouts):
        sizes = [size for size in natural_worlds(layout) if worlds is None or size in worlds] or list(worlds or ())
        world = next((size for size in sizes if size > 1), sizes[0])
        cases.append(Case(layout, world, models[number % len(models)], dtypes[0]))
    cases += [replace(case, model=models[-1], dtype=dtype) for case in cases if case.layout in ("zero3", "tp2")
              for dtype in dtypes[1:]]
    return sorted(cases, key=lambda case: case.world)


def divide(cases: Sequence[Case], device: str | None) -> tuple[list[Case], list[Skipped]]:
    """Those that can run here, and those that cannot."""
    legal: list[Case] = []
    skipped: list[Skipped] = []
    for case in cases:
        try:
            resolve_case(case, device)
        except UserError as error:
            # An op that is not built is a state of this machine, and has a command that mends it.
            illegal = not (error.instead or "").startswith("ezpz-llm doctor")
            mend = "" if illegal or not error.instead else f" (type: {error.instead})"
            skipped.append(Skipped(case, error.found + mend, illegal))
        else:
            legal.append(case)
    return legal, skipped
