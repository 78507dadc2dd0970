"""Recommend a layout for devices of a given memory, by states and activations of each in both bf16 recipes.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from ezpz_llm.base import UserError
from ezpz_llm.layout.constraints import validate
from ezpz_llm.layout.knobs import Case
from ezpz_llm.layout.layout import Layout, ZeroOptions
from ezpz_llm.layout.memory import Pass, activation_bytes, memory_per_rank, total, whole_bytes
from ezpz_llm.layout.precision_recipes import check_engine
from ezpz_llm.layout.suggest import selection, shipped_layouts
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.loss_chunk import chosen_chunk, most_logits
from ezpz_llm.observe.tables import table

RECIPES = ("bf16", "bf16_autocast")
"""The one with half the bytes on the wire first."""
USABLE = 0.85
"""Of a device's memory: buckets, gathered layers and what the allocator leaves unused take the rest."""
_STAGE_ORDER = (1, 2, 3, 0)
_SHOWN = 16


@dataclass(frozen=True)
class Choice:
    """A legal layout: what to type, and bytes on the device by recipe, None for one that its engine lacks."""

    words: str
    layout: Layout
    bytes: dict[str, int | None]

    def recipe(self, most: float) -> str | None:
        """The first recipe that fits."""
        return next((name for name, size in self.bytes.items() if size is not None and size <= most), None)


def choices(model: ModelConfig, world_size: int, micro_batch: int, ranks_per_node: int | None,
            memory: float) -> list[Choice]:
    """Legal layouts in the order in which to try them: ZeRO, tensor parallelism inside a node, pipelines, sequence
    parallelism, and offload last.

    Args:
        memory: bytes of a device, from which chunks of logits follow.
    """
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    grids = [Layout(f"zero{stage}", "deepspeed", ZeroOptions(stage), tp, pp, sp)
             for stage in _STAGE_ORDER for tp, pp, sp in product(sizes, repeat=3)
             if not world_size % (tp * pp * sp)]
    found: dict[str, Choice] = {}
    for layout in (*shipped_layouts(), *grids):
        used, _, problem = validate(Case(layout, world_size, model))
        words = selection(used) if problem is None else None
        in_node = ranks_per_node is None or layout.tp == 1 or ranks_per_node % layout.tp == 0
        if words is not None and in_node and words not in found:
            sizes_of = {name: _device_bytes(used, model, world_size, micro_batch, name, memory) for name in RECIPES}
            found[words] = Choice(words, used, sizes_of)
    return sorted(found.values(), key=lambda choice: _order(choice.layout))


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
    # A pipeline is full with as many micro batches as it has stages.
    chunk = chosen_chunk(tokens, columns, most_logits("cuda", int(memory)))
    work = Pass(micro_batch, layout.pp, recipe, chunk=chunk)
    states = total(memory_per_rank(layout, model, world_size, precision=recipe), "device")
    return states + whole_bytes(layout, model, recipe, layout.pp) + activation_bytes(layout, model, work)


def recommendation(found: list[Choice], memory: float, command: str) -> str:
    """One line to type, or what to change where nothing fits.

    Args:
        memory: bytes of a device.
        command: the words before the layout's.
    """
    most = USABLE * memory
    best = next((choice for choice in found if choice.recipe(most)), None)
    if best is None:
        return "Nothing fits: more ranks, --micro-batch-size 1, --recompute 1, or a smaller model."
    recipe = best.recipe(most)
    size = best.bytes[recipe or ""] or 0
    return (f"Take: {command} {best.words} --precision {recipe}\n"
            f"      {size / 1e9:.3g} GB of {memory / 1e9:.3g} GB a device, by arithmetic")


def choices_text(found: list[Choice], memory: float, title: str, *, rich: bool) -> str:
    """The layouts in the order in which to try them, those that fit first."""
    most = USABLE * memory
    fitting = sorted(found, key=lambda choice: choice.recipe(most) is None)
    rows = [[choice.words, *("-" if size is None else f"{size / 1e9:.3g}" for size in choice.bytes.values()),
             choice.recipe(most) or "does not fit"] for choice in fitting[:_SHOWN]]
    left = len(fitting) - len(rows)
    return table(title, ("select with", *RECIPES, "fits in"), rows, rich=rich) + (
        f"  ({left} more; without --memory all are listed)\n" if left > 0 else "")
