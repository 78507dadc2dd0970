"""The table "Certified" of docs/layouts.md, from certify's JSON (imports no torch)."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from ezpz_llm.base.errors import UserError
from ezpz_llm.certify import recipe
from ezpz_llm.certify.cases import layout_of
from ezpz_llm.certify.report import injected_fault
from ezpz_llm.layout.resolve import resolve
from ezpz_llm.rundir import write_atomic

BEGIN, END = "<!-- certified: written by certify --write-docs -->", "<!-- certified: end -->"
_PAGE = Path(__file__).resolve().parents[2] / "docs" / "layouts.md"
_HEADER = ("layout", "legal with", "certified", "memory a rank, measured / arithmetic",
           "collectives a step of a rank", "textbook")
_EXTRA_WORLD = 8


def write_docs(kept: dict[str, Any], page: Path = _PAGE) -> None:
    """Replace the table between the marks of a page, or append it with its marks.

    Args:
        kept: what `report.record` gives, also as read from its file.

    Raises:
        UserError: there is no such page.
    """
    if not page.is_file():
        raise UserError("there is no page to write to", where=str(page), instead="a checkout of the repository")
    text = page.read_text()
    if BEGIN not in text:
        text = f"{text.rstrip()}\n\n## Certified\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    write_atomic(page, f"{before}{BEGIN}\n{certified(kept)}{END}{rest.partition(END)[2]}")


def certified(kept: dict[str, Any]) -> str:
    """The table as Markdown, with what its numbers are of."""
    results = [one for one in kept["results"] if not injected_fault(one)]
    layouts = dict.fromkeys([one["layout"] for one in results] + [one["layout"] for one in kept["skipped"]])
    versions = kept["environment"].get("versions", {})
    named = ", ".join(f"{name} {versions[name]}" for name in ("torch", "deepspeed", "python") if name in versions)
    about = (
        f"`{kept['command']}`, {kept['date']}, {named}. Bytes and collectives are those of {recipe.MODELS[0]} as "
        "certify has it, in fp32, in the largest world that was certified, on rank 0. Memory is parameters, "
        "gradients and optimizer (with DeepSpeed's copy of its share), the most of each that lives during a step; "
        "after the plus sign come whole parameters that stage 3 has gathered or keeps, and buckets and other "
        "buffers. Collectives count the bytes of whole buffers; the textbook's are of the same step. DeepSpeed's "
        "buckets and thresholds are scaled down with the model.")
    rows = [_HEADER, ("---",) * len(_HEADER), *(_row(name, results, kept) for name in sorted(layouts))]
    lines = [*textwrap.wrap(about, 116, break_long_words=False, break_on_hyphens=False), "",
             *(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join(lines)


def _row(name: str, results: list[dict[str, Any]], kept: dict[str, Any]) -> tuple[str, ...]:
    mine = [one for one in results if one["layout"] == name]
    shown = [one for one in mine if one["dtype"] == "fp32" and one["model"] == recipe.MODELS[0] and one["worst"]]
    best = max(shown, key=lambda one: one["world"], default=None)
    return (f"`{name}`", legal_with(name), _certified(name, mine, kept),
            *(("-", "-", "-") if best is None else (_memory(best), _issued(best), _volume(best["textbook"]))))


def legal_with(name: str) -> str:
    """The degrees of 2 that can be added to a layout."""
    own = layout_of(name)
    found = []
    for axis in ("tp", "pp", "sp"):
        if getattr(own, axis) > 1:
            continue
        try:
            resolve(name, world_size=_EXTRA_WORLD, global_batch=recipe.GLOBAL_BATCH,
                    accumulation=1 if axis == "sp" else 2, precision="fp32", device="cpu",
                    model=recipe.model_config(recipe.MODELS[0]), **{axis: 2})
        except UserError:
            continue
        found.append(axis)
    return ", ".join(["dp", *found])


def _certified(name: str, mine: list[dict[str, Any]], kept: dict[str, Any]) -> str:
    if not mine:
        reason = next((one["reason"] for one in kept["skipped"] if one["layout"] == name), "not run")
        return f"no: {reason}"
    failed = [one for one in mine if not one["passed"]]
    if failed:
        return f"**no**: {len(failed)} of {len(mine)} failed"
    worlds = ", ".join(str(world) for world in sorted({one["world"] for one in mine}))
    return f"{kept['date']}: {worlds} ranks; {', '.join(sorted({one['dtype'] for one in mine}, reverse=True))}"


def _memory(one: dict[str, Any]) -> str:
    measured = one["memory"][0]
    arithmetic = sum(part["bytes"] for part in one["arithmetic"] if part["where"] != "files")
    above = measured["gathered"] + measured["other"]
    return f"{sum(measured.values()) - above:,} / {arithmetic:,} (+{above:,}) on {one['world']}"


def _issued(one: dict[str, Any]) -> str:
    kinds = one["collectives"][0]["kinds"]
    return "; ".join(f"{kind} {entry['count']} x, {entry['bytes']:,} B" for kind, entry in kinds.items()) or "none"


def _volume(kinds: dict[str, int]) -> str:
    return "; ".join(f"{kind} {size:,} B" for kind, size in kinds.items()) or "none"
