"""What is legal, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ezpz_llm.dist.degrees import Degrees
from ezpz_llm.engine.memory import Part, total
from ezpz_llm.layouts.listing import STAGES, Grid, Named, crosses
from ezpz_llm.observe.tables import table

_FOOT = """Bytes are those of the rank that has most, in fp32: 4 a parameter, 4 its gradient, 8 Adam's moments, and
4 for the flat copy that DeepSpeed steps in stages 1 to 3. "cast": the 2-byte copies of the blocks' matrices that
autocast keeps from forward to backward pass in bf16 and fp16. Activations, buckets and gathered layers come on top.
A named layout takes other degrees by --tp, --pp and --sp."""


def purposes_text(purposes: dict[str, str]) -> str:
    """A line a layout."""
    width = max(map(len, purposes))
    return "\n".join(f"{name:<{width}}  {purpose.replace('`', '')}" for name, purpose in purposes.items())


def legal_text(model: str, world_size: int, named: list[Named], grids: list[Grid], ranks_per_node: int | None, *,
               rich: bool) -> str:
    """The named layouts, why some are not legal, and all legal degrees."""
    rows = [[entry.name, *_degree_cells(entry.degrees), *_memory_cells(entry.memory)]
            for entry in named if entry.degrees is not None]
    parts = [table(f"Named layouts for {model} on {world_size} ranks, GB a rank",
                   ("name", *_DEGREES, "parameters", "gradients", "optimizer", "cast", "device", "host", "files"),
                   rows, rich=rich)]
    refused = [entry for entry in named if entry.reason is not None]
    if refused:
        parts.append("Not legal:\n" + "".join(
            f"  {entry.name}: {entry.reason}; instead: {' or '.join(entry.instead) or '-'}\n" for entry in refused))
    across = ranks_per_node is not None
    columns = ("select with", *_DEGREES, *(f"zero{stage}" for stage in STAGES), *(("TP group",) if across else ()))
    rows = [[grid.words[min(grid.words, key=lambda stage: abs(stage - 1))], *_degree_cells(grid.degrees),
             *_stage_cells(grid),
             *((("crosses nodes" if crosses(grid.degrees, ranks_per_node) else "in a node"),) if across else ())]
            for grid in grids]
    parts.append(table("Legal degrees, GB a rank and ZeRO stage (--ds-config zero0 to zero3)", columns, rows,
                       rich=rich))
    return "\n".join([*parts, _FOOT])


def as_json(model: str, world_size: int, named: list[Named], grids: list[Grid],
            ranks_per_node: int | None) -> dict[str, Any]:
    """The same as JSON values, in bytes."""
    return {
        "model": model,
        "world_size": world_size,
        "named": [{**asdict(entry), "memory": _memory(entry.memory)} for entry in named],
        "degrees": [{
            **asdict(grid.degrees),
            "stages": {str(stage): {"memory": _memory(parts), "words": grid.words[stage]}
                       for stage, parts in grid.memory.items()},
            **({} if ranks_per_node is None else {"crosses_nodes": crosses(grid.degrees, ranks_per_node)}),
        } for grid in grids],
    }


_DEGREES = ("dp", "tp", "pp", "sp")


def _degree_cells(degrees: Degrees | None) -> list[str]:
    return [str(getattr(degrees, name)) for name in _DEGREES]


def _memory_cells(parts: tuple[Part, ...]) -> list[str]:
    kinds = (("parameters",), ("gradients",), ("optimizer", "copy"), ("cast",))
    return [*(_gigabytes(sum(part.bytes for part in parts if part.kind in kind)) for kind in kinds),
            *(_gigabytes(total(parts, where)) for where in ("device", "host", "files"))]


def _stage_cells(grid: Grid) -> list[str]:
    return [_gigabytes(total(grid.memory[stage], "device")) if stage in grid.memory else "-" for stage in STAGES]


def _memory(parts: tuple[Part, ...]) -> list[dict[str, Any]]:
    return [asdict(part) for part in parts]


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g}" if count else "-"
