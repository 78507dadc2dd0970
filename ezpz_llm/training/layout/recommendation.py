"""Recommend a layout that fits a device's memory, by estimates for both bf16 recipes (imports no torch).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from ezpz_llm.core.base import UserError
from ezpz_llm.training.layout.constraints import validate
from ezpz_llm.training.layout.knobs import LayoutCheck
from ezpz_llm.training.layout.layout import Layout, ZeroOptions
from ezpz_llm.training.layout.memory import Pass, activation_bytes, memory_per_rank, total, unsharded_bytes
from ezpz_llm.training.layout.precision_recipes import check_engine
from ezpz_llm.training.layout.suggestions import selection, shipped_layouts
from ezpz_llm.training.model.config import ModelConfig, Recompute
from ezpz_llm.training.model.loss_chunk import choose_chunk, max_logits
from ezpz_llm.training.observe.tables import table

RECIPES = ("bf16", "bf16_autocast")
"""Recipes in order of preference: "bf16" sends half as many bytes as "bf16_autocast"."""
_USABLE = 0.85
"""Fraction of a device's memory for states and activations.

The rest is for buckets, gathered layers and fragmentation.
"""
_STAGES = (1, 2, 3, 0)
_SHARDING_ORDER = (1, 2, "fsdp2", 3, 0)
"""ZeRO stages in order of preference. fsdp2 shards as much as stage 3, which cannot be compiled."""
_SHOWN = 16


@dataclass(frozen=True)
class Setting:
    """Options that trade memory for time: sequences in a micro-batch, and the trainer's `--recompute`."""

    micro_batch: int
    recompute: Recompute


def settings_to_try(micro_batch: int, recompute: Recompute) -> list[Setting]:
    """Return the settings in the order in which to try them: smaller micro-batches, then recomputation."""
    sizes = [micro_batch >> halvings for halvings in range(micro_batch.bit_length())]
    kinds: dict[Recompute, None] = dict.fromkeys((recompute, "selective", 1))
    return [Setting(size, kind) for kind in kinds for size in sizes]


@dataclass(frozen=True)
class Choice:
    """Legal layout, and the options that select it."""

    words: str
    layout: Layout


@dataclass(frozen=True)
class Cluster:
    """Model, number of ranks, and memory of a device in bytes, which determines the chunks of logits."""

    model: ModelConfig
    world_size: int
    memory: float

    @property
    def usable(self) -> float:
        """Bytes of a device for states and activations."""
        return _USABLE * self.memory

    def bytes(self, layout: Layout, setting: Setting) -> dict[str, int | None]:
        """Return bytes on the device by recipe; None if the layout does not support recipe and setting."""
        return {name: _device_bytes(self, layout, setting, name) for name in RECIPES}

    def recipe(self, layout: Layout, setting: Setting) -> str | None:
        """Return the first recipe that fits, or None."""
        return next((name for name, size in self.bytes(layout, setting).items()
                     if size is not None and size <= self.usable), None)


def choices(model: ModelConfig, world_size: int, ranks_per_node: int | None) -> list[Choice]:
    """Return legal layouts in the order of docs/use/which_layout.md.

    First ZeRO, then tensor parallelism inside a node, pipelines, sequence parallelism, and offload.
    """
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    grids = [Layout(f"zero{stage}", "deepspeed", ZeroOptions(stage), tp, pp, sp)
             for stage in _STAGES for tp, pp, sp in product(sizes, repeat=3)
             if not world_size % (tp * pp * sp)]
    by_flags: dict[str, Choice] = {}
    for layout in (*shipped_layouts(), *grids):
        used, _, problem = validate(LayoutCheck(layout, world_size, model))
        flags = selection(used) if problem is None else None
        in_node = ranks_per_node is None or layout.tp == 1 or ranks_per_node % layout.tp == 0
        if flags is not None and in_node:
            by_flags.setdefault(flags, Choice(flags, used))
    # A single rank has nothing to shard: ddp needs the least time.
    return sorted(by_flags.values(), key=lambda choice: (world_size > 1 or choice.layout.name != "ddp",
                                                         _order(choice.layout)))


def _order(layout: Layout) -> tuple[object, ...]:
    sharding = "fsdp2" if layout.engine == "fsdp2" else layout.zero.stage
    offload = (layout.zero.offload_optimizer is not None) + 2 * (layout.zero.offload_param is not None)
    place = _SHARDING_ORDER.index(sharding) if sharding in _SHARDING_ORDER else len(_SHARDING_ORDER)
    return offload, layout.sp, layout.pp, layout.tp, layout.engine == "ddp", bool(layout.zero.tiled), place


def _device_bytes(cluster: Cluster, layout: Layout, setting: Setting, recipe: str) -> int | None:
    try:
        check_engine(recipe, layout, "--precision")
    except UserError:
        return None
    if setting.recompute == "selective" and layout.zero.stage == 3:
        return None
    model = cluster.model
    tokens, columns = setting.micro_batch * model.block_size // layout.sp, model.padded_vocab_size // layout.tp
    # A pipeline is full with as many micro-batches as stages.
    chunk = choose_chunk(tokens, columns, max_logits("cuda", int(cluster.memory)))
    work = Pass(setting.micro_batch, layout.pp, recipe, setting.recompute, chunk=chunk)
    states = total(memory_per_rank(layout, model, cluster.world_size, precision=recipe), "device")
    return states + unsharded_bytes(layout, model, recipe, layout.pp) + activation_bytes(layout, model, work)


def first_fit(legal: list[Choice], settings: list[Setting], cluster: Cluster) -> tuple[Choice, Setting] | None:
    """Return the first layout that fits, with the first setting with which it does; None if no layout fits."""
    return next(((choice, setting) for choice in legal for setting in settings
                 if cluster.recipe(choice.layout, setting)), None)


def recommendation(best: tuple[Choice, Setting] | None, cluster: Cluster, command: str) -> str:
    """Return the command for the first layout that fits, or what to change if none does.

    Args:
        command: the command line up to the options of micro-batch and layout.
    """
    if best is None:
        return "No layout fits. Use more ranks, a shorter --block-size, or a smaller model."
    choice, setting = best
    recipe = cluster.recipe(choice.layout, setting) or RECIPES[0]
    size = cluster.bytes(choice.layout, setting)[recipe] or 0
    recompute = f" --recompute {setting.recompute}" if setting.recompute else ""
    return (f"Recommended: {command} --micro-batch-size {setting.micro_batch}{recompute} {choice.words} "
            f"--precision {recipe}\n"
            f"             estimated {size / 1e9:.3g} GB of {cluster.memory / 1e9:.3g} GB per device")


def choices_text(legal: list[Choice], setting: Setting, cluster: Cluster, title: str, *, rich: bool) -> str:
    """Return the table of layouts with one setting, the fitting ones first."""
    fitting = sorted(legal, key=lambda choice: cluster.recipe(choice.layout, setting) is None)
    rows = [[choice.words, *("-" if size is None else f"{size / 1e9:.3g}"
                             for size in cluster.bytes(choice.layout, setting).values()),
             cluster.recipe(choice.layout, setting) or "does not fit"] for choice in fitting[:_SHOWN]]
    omitted = len(fitting) - len(rows)
    return table(title, ("select with", *RECIPES, "fits in"), rows, rich=rich) + (
        f"  ({omitted} more; omit --memory to list all legal layouts)\n" if omitted > 0 else "")
