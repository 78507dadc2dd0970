"""What is legal, as values (imports no torch)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import product

from ezpz_llm.dist.degrees import Degrees
from ezpz_llm.engine import ds_config
from ezpz_llm.engine.layout import Layout
from ezpz_llm.engine.legal import Case, examine
from ezpz_llm.engine.memory import Part, cast_per_rank, memory_per_rank
from ezpz_llm.engine.nearest import choices, is_legal, selection, shipped_layouts, words
from ezpz_llm.errors import UserError
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.resources import data_dir

STAGES = (0, 1, 2, 3)
_PURPOSE = re.compile(r"^\| `(\w+)` \| (.*) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Named:
    """A shipped layout on so many ranks: its memory a rank, or why it is not legal and what to type instead."""

    name: str
    degrees: Degrees | None = None
    memory: tuple[Part, ...] = ()
    reason: str | None = None
    instead: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grid:
    """Legal degrees: what each of the ZeRO stages that are legal with them takes on a rank, and what to type."""

    degrees: Degrees
    memory: dict[int, tuple[Part, ...]] = field(default_factory=dict)
    words: dict[int, str] = field(default_factory=dict)


def purposes() -> dict[str, str]:
    """A line on each shipped layout, from the page beside the files."""
    text = (data_dir("ds_configs") / "README.md").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for name, purpose in _PURPOSE.findall(text):
        if name in ds_config.names():
            found.setdefault(name, purpose)  # a second table is of keys, one of which is called as a layout is
    return found


def named_layouts(model: ModelConfig, world_size: int) -> list[Named]:
    """Every shipped layout as it is."""
    return [_named(layout, model, world_size) for layout in shipped_layouts()]


def _named(layout: Layout, model: ModelConfig, world_size: int) -> Named:
    case = Case(layout, world_size, model)
    used, _, problem = examine(case)
    if problem is not None:
        instead = tuple(words(case, choice) for choice in choices(case, problem))
        return Named(layout.name, reason=problem.found, instead=instead)
    return Named(layout.name, _degrees(used, world_size), _memory(used, model, world_size))


def _memory(layout: Layout, model: ModelConfig, world_size: int) -> tuple[Part, ...]:
    """In bf16 or fp16, which is what devices train in unless told otherwise."""
    return (*memory_per_rank(layout, model, world_size), cast_per_rank(layout, model))


def legal_grids(model: ModelConfig, world_size: int) -> list[Grid]:
    """All degrees that divide the ranks and the model, with the ZeRO stages that go with them."""
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    found = []
    for pp, tp, sp in product(sizes, repeat=3):
        if world_size % (pp * tp * sp):
            continue
        layouts = {stage: Layout(f"zero{stage}", "deepspeed", stage, tp, pp, sp) for stage in STAGES}
        legal = {stage: layout for stage, layout in layouts.items() if is_legal(Case(layout, world_size, model))}
        if legal:
            memory = {stage: _memory(layout, model, world_size) for stage, layout in legal.items()}
            found.append(Grid(Degrees.of_world(world_size, tp, pp, sp), memory,
                              {stage: selection(layout) or "" for stage, layout in legal.items()}))
    return found


def crosses(degrees: Degrees, ranks_per_node: int) -> bool:
    """Whether tensor-parallel groups have ranks on more than one node."""
    return degrees.tp > 1 and ranks_per_node % degrees.tp != 0


def check_world(world_size: int | None, ranks_per_node: int | None) -> None:
    """Refuse numbers of ranks that are none.

    Raises:
        UserError: names the option.
    """
    for option, value in (("--world", world_size), ("--ranks-per-node", ranks_per_node)):
        if value is not None and value < 1:
            raise UserError(f"{value} ranks", where=option, instead="1 or more")
    if ranks_per_node is not None and world_size is None:
        raise UserError("--ranks-per-node without --world", instead="both")


def _degrees(layout: Layout, world_size: int) -> Degrees:
    return Degrees.of_world(world_size, layout.tp, layout.pp, layout.sp)
