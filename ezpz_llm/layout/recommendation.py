"""Recommend a layout that fits a device's memory, by estimates for both bf16 recipes (imports no torch).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from ezpz_llm.base import UserError
from ezpz_llm.layout.constraints import validate
from ezpz_llm.layout.knobs import LayoutCheck
from ezpz_llm.layout.layout import Layout, ZeroOptions
from ezpz_llm.layout.memory import Pass, activation_bytes, memory_per_rank, total, unsharded_bytes
from ezpz_llm.layout.precision_recipes import check_engine
from ezpz_llm.layout.suggestions import selection, shipped_layouts
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.loss_chunk import choose_chunk, max_logits
from ezpz_llm.observe.tables import table

RECIPES = ("bf16", "bf16_autocast")
"""Recipes in order of preference: "bf16" sends half as many bytes as "bf16_autocast"."""
_USABLE = 0.85
"""Fraction of a device's memory for states and activations.

The rest is for buckets, gathered layers and fragmentation.
"""
_STAGE_ORDER = (1, 2, 3, 0)
_SHOWN = 16


@dataclass(frozen=True)
class Choice:
    """Legal layout, the options that select it, and bytes on the device by recipe (None if unsupported)."""

    words: str
    layout: Layout
    bytes: dict[str, int | None]

    def recipe(self, most: float) -> str | None:
        """Return the first recipe that needs at most `most` bytes, or None."""
        return next((name for name, size in self.bytes.items() if size is not None and size <= most), None)


def choices(model: ModelConfig, world_size: int, micro_batch: int, ranks_per_node: int | None,
            memory: float) -> list[Choice]:
    """Return legal layouts in the order in which to try them.

    First ZeRO, then tensor parallelism inside a node, pipelines, sequence parallelism, and offload.

    Args:
        memory: bytes of a device, which determine the chunks of logits.
    """
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    grids = [Layout(f"zero{stage}", "deepspeed", ZeroOptions(stage), tp, pp, sp)
             for stage in _STAGE_ORDER for tp, pp, sp in product(sizes, repeat=3)
             if not world_size % (tp * pp * sp)]
    by_flags: dict[str, Choice] = {}
    for layout in (*shipped_layouts(), *grids):
        used, _, problem = validate(LayoutCheck(layout, world_size, model))
        flags = selection(used) if problem is None else None
        in_node = ranks_per_node is None or layout.tp == 1 or ranks_per_node % layout.tp == 0
        if flags is not None and in_node and flags not in by_flags:
            bytes_by_recipe = {name: _device_bytes(used, model, world_size, micro_batch, name, memory)
                               for name in RECIPES}
            by_flags[flags] = Choice(flags, used, bytes_by_recipe)
    return sorted(by_flags.values(), key=lambda choice: _order(choice.layout))


def _order(layout: Layout) -> tuple[object, ...]:
    stage = layout.zero.stage
    offload = (layout.zero.offload_optimizer is not None) + 2 * (layout.zero.offload_param is not None)
    place = _STAGE_ORDER.index(stage) if stage in _STAGE_ORDER else len(_STAGE_ORDER)
    return offload, layout.sp, layout.pp, layout.tp, layout.engine != "deepspeed", bool(layout.zero.tiled), place


def _device_bytes(layout: Layout, model: ModelConfig, world_size: int, micro_batch: int, recipe: str,
                  memory: float) -> int | None:
    try:
        check_engine(recipe, layout, "--precision")
    except UserError:
        return None
    tokens, columns = micro_batch * model.block_size // layout.sp, model.padded_vocab_size // layout.tp
    # A pipeline is full with as many micro-batches as stages.
    chunk = choose_chunk(tokens, columns, max_logits("cuda", int(memory)))
    work = Pass(micro_batch, layout.pp, recipe, chunk=chunk)
    states = total(memory_per_rank(layout, model, world_size, precision=recipe), "device")
    return states + unsharded_bytes(layout, model, recipe, layout.pp) + activation_bytes(layout, model, work)


def recommendation(legal: list[Choice], memory: float, command: str) -> str:
    """Return the command for the first layout that fits, or what to change if none does.

    Args:
        memory: bytes of a device.
        command: the command line up to the layout's options.
    """
    usable = _USABLE * memory
    best = next((choice for choice in legal if choice.recipe(usable)), None)
    if best is None:
        return "No layout fits. Use more ranks, --micro-batch-size 1, --recompute 1, or a smaller model."
    recipe = best.recipe(usable)
    size = best.bytes[recipe or ""] or 0
    return (f"Recommended: {command} {best.words} --precision {recipe}\n"
            f"             estimated {size / 1e9:.3g} GB of {memory / 1e9:.3g} GB per device")


def choices_text(legal: list[Choice], memory: float, title: str, *, rich: bool) -> str:
    """Return the table of layouts, the fitting ones first."""
    usable = _USABLE * memory
    fitting = sorted(legal, key=lambda choice: choice.recipe(usable) is None)
    rows = [[choice.words, *("-" if size is None else f"{size / 1e9:.3g}" for size in choice.bytes.values()),
             choice.recipe(usable) or "does not fit"] for choice in fitting[:_SHOWN]]
    omitted = len(fitting) - len(rows)
    return table(title, ("select with", *RECIPES, "fits in"), rows, rich=rich) + (
        f"  ({omitted} more; omit --memory to list all legal layouts)\n" if omitted > 0 else "")
