"""Lists of legal layouts for a model and a number of ranks, as text and JSON (imports no torch)."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

from ezpz_llm.core.base import UserError, count_noun, data_dir
from ezpz_llm.training.dist.degrees import Degrees
from ezpz_llm.training.layout import ds_config
from ezpz_llm.training.layout.constraints import validate
from ezpz_llm.training.layout.knobs import LayoutCheck
from ezpz_llm.training.layout.layout import Layout, ZeroOptions
from ezpz_llm.training.layout.memory import Part, cast_per_rank, memory_per_rank, total
from ezpz_llm.training.layout.precision_recipes import check_engine
from ezpz_llm.training.layout.suggestions import alternatives, as_cli_flags, is_legal, selection, shipped_layouts
from ezpz_llm.training.model.config import ModelConfig
from ezpz_llm.training.observe.tables import table

STAGES = (0, 1, 2, 3)
_PURPOSE = re.compile(r"^\| `(\w+)` \| (.*) \|$", re.MULTILINE)


@dataclass(frozen=True)
class NamedLayout:
    """Memory per rank of a shipped layout, or why it is not legal and what to type instead.

    `memory` is for fp32 and autocast, `memory_bf16` for `--precision bf16` (empty if unsupported).
    """

    name: str
    degrees: Degrees | None = None
    memory: tuple[Part, ...] = ()
    memory_bf16: tuple[Part, ...] = ()
    reason: str | None = None
    instead: tuple[str, ...] = ()


@dataclass(frozen=True)
class LegalGrid:
    """Legal degrees with, by legal ZeRO stage, the memory per rank and the options that select it."""

    degrees: Degrees
    memory: dict[int, tuple[Part, ...]] = field(default_factory=dict)
    words: dict[int, str] = field(default_factory=dict)


def layout_purposes() -> dict[str, str]:
    """Return a one-line description of each shipped layout, from ds_configs/README.md."""
    text = (data_dir("ds_configs") / "README.md").read_text(encoding="utf-8")
    purposes: dict[str, str] = {}
    for name, purpose in _PURPOSE.findall(text):
        if name in ds_config.names():
            purposes.setdefault(name, purpose)  # a later table lists keys, one with a layout's name
    return purposes


def named_layouts(model: ModelConfig, world_size: int) -> list[NamedLayout]:
    """Return an entry for every shipped layout, with its own degrees."""
    return [_named_layout(layout, model, world_size) for layout in shipped_layouts()]


def _named_layout(layout: Layout, model: ModelConfig, world_size: int) -> NamedLayout:
    case = LayoutCheck(layout, world_size, model)
    used, _, problem = validate(case)
    if problem is not None:
        instead = tuple(as_cli_flags(case, choice) for choice in alternatives(case, problem))
        return NamedLayout(layout.name, reason=problem.message, instead=instead)
    try:
        check_engine("bf16", used, "--precision")
    except UserError:
        memory_bf16: tuple[Part, ...] = ()
    else:
        memory_bf16 = memory_per_rank(used, model, world_size, precision="bf16")
    return NamedLayout(layout.name, used.degrees(world_size), _memory(used, model, world_size), memory_bf16)


def _memory(layout: Layout, model: ModelConfig, world_size: int) -> tuple[Part, ...]:
    """Return the memory with fp32 parameters, including autocast's copies."""
    return (*memory_per_rank(layout, model, world_size), cast_per_rank(layout, model))


def legal_grids(model: ModelConfig, world_size: int) -> list[LegalGrid]:
    """Return all degrees that divide the ranks and the model, with their legal ZeRO stages."""
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    grids = []
    for pp, tp, sp in product(sizes, repeat=3):
        if world_size % (pp * tp * sp):
            continue
        layouts = {stage: Layout(f"zero{stage}", "deepspeed", ZeroOptions(stage), tp, pp, sp) for stage in STAGES}
        legal = {stage: layout for stage,
                 layout in layouts.items() if is_legal(LayoutCheck(layout, world_size, model))}
        if legal:
            memory = {stage: _memory(layout, model, world_size) for stage, layout in legal.items()}
            grids.append(LegalGrid(Degrees.of_world(world_size, tp, pp, sp), memory,
                                   {stage: selection(layout) or "" for stage, layout in legal.items()}))
    return grids


def crosses_nodes(degrees: Degrees, ranks_per_node: int) -> bool:
    """Return True if tensor-parallel groups span more than one node."""
    return degrees.tp > 1 and ranks_per_node % degrees.tp != 0


def check_world(world_size: int | None, ranks_per_node: int | None) -> None:
    """Check the numbers of ranks.

    Raises:
        UserError: a number below 1, or --ranks-per-node without --world.
    """
    for option, value in (("--world", world_size), ("--ranks-per-node", ranks_per_node)):
        if value is not None and value < 1:
            raise UserError(f"{value} is not a number of ranks", where=option, instead="1 or more")
    if ranks_per_node is not None and world_size is None:
        raise UserError("--ranks-per-node requires --world", instead="--world N --ranks-per-node M")


_FOOT = """\
Memory is for the rank that needs most, in fp32. Bytes per parameter: 4 for the value, 4 for the gradient,
8 for Adam's moments, and 4 for the flat copy that DeepSpeed steps in stages 1 to 3. "cast": the 2-byte copies of
the blocks' matrices that autocast keeps from forward to backward pass. "bf16": on the device with --precision
bf16. "-": zero bytes, or not supported. Activations, buckets and gathered layers come on top.
Pass --tp, --pp and --sp to run a named layout with other degrees."""


def purposes_text(purposes: dict[str, str]) -> str:
    """Return one line per layout."""
    width = max(map(len, purposes))
    return "\n".join(f"{name:<{width}}  {purpose.replace('`', '')}" for name, purpose in purposes.items())


def legal_text(model: str, world_size: int, named: list[NamedLayout], grids: list[LegalGrid],
               ranks_per_node: int | None, *,
               rich: bool) -> str:
    """Return the tables of named layouts and of legal degrees, and the reasons why layouts are not legal."""
    rows = [[entry.name, *_degree_cells(entry.degrees), *_memory_cells(entry.memory),
             _gigabytes(total(entry.memory_bf16, "device"))] for entry in named if entry.degrees is not None]
    parts = [table(f"Named layouts for {model} on {count_noun(world_size, 'rank')}, GB per rank",
                   ("name", *_DEGREES, "parameters", "gradients", "optimizer", "cast", "device", "host", "files",
                    "bf16"), rows, rich=rich)]
    illegal = [entry for entry in named if entry.reason is not None]
    if illegal:
        parts.append("Not legal:\n" + "".join(
            f"  {entry.name}: {entry.reason}; instead: {' or '.join(entry.instead) or '-'}\n" for entry in illegal))
    columns = ["select with", *_DEGREES, *(f"zero{stage}" for stage in STAGES),
               *([] if ranks_per_node is None else ["TP group"])]
    rows = [[grid.words[min(grid.words, key=lambda stage: abs(stage - 1))], *_degree_cells(grid.degrees),
             *(_gigabytes(total(grid.memory[stage], "device")) if stage in grid.memory else "-"
               for stage in STAGES),
             *([] if ranks_per_node is None else
               ["crosses nodes" if crosses_nodes(grid.degrees, ranks_per_node) else "in a node"])]
            for grid in grids]
    parts.append(table("Legal degrees, GB per rank and ZeRO stage (--ds-config zero0 to zero3)", columns, rows,
                       rich=rich))
    return "\n".join([*parts, _FOOT])


def as_json(model: str, world_size: int, named: list[NamedLayout], grids: list[LegalGrid],
            ranks_per_node: int | None) -> dict[str, Any]:
    """Return the lists of `legal_text` as JSON values, with memory in bytes."""
    return {
        "model": model,
        "world_size": world_size,
        "named": [asdict(entry) for entry in named],
        "degrees": [{
            **asdict(grid.degrees),
            "stages": {str(stage): {"memory": [asdict(part) for part in parts], "words": grid.words[stage]}
                       for stage, parts in grid.memory.items()},
            **({} if ranks_per_node is None else {"crosses_nodes": crosses_nodes(grid.degrees, ranks_per_node)}),
        } for grid in grids],
    }


_DEGREES = ("dp", "tp", "pp", "sp")


def _degree_cells(degrees: Degrees | None) -> list[str]:
    return [str(getattr(degrees, name)) for name in _DEGREES]


def _memory_cells(parts: tuple[Part, ...]) -> list[str]:
    kinds = (("parameters", "secondary"), ("gradients",), ("optimizer", "copy"), ("cast",))
    return [*(_gigabytes(sum(part.bytes for part in parts if part.kind in kind)) for kind in kinds),
            *(_gigabytes(total(parts, where)) for where in ("device", "host", "files"))]


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g}" if count else "-"
