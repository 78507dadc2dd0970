"""What other tools measured of the same steps, beside ours (imports no torch)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ezpz_llm.explain.split import Split
from ezpz_llm.rundir import RunDir, read_json

_TORCH = "torch"


def crosschecks(run_dir: Path, split: Split | None) -> dict[str, Any]:
    """What there is of: `collectives`, a step's by DeepSpeed's logger (logged) and by the traces (issued); `flops`,
    of the matrix products in a step's forward passes on rank 0, by DeepSpeed's profiler and by our arithmetic;
    `host`, seconds of pyinstrument's profile of rank 0 by package."""
    found: dict[str, Any] = {}
    if split is not None:
        rank = split.ranks[0]
        if logged := sum(entry["count"] for entry in (rank.notes.get("deepspeed") or {}).values()):
            issued = sum(one.count for one in rank.exposed) / rank.steps
            found["collectives"] = {"logged": logged, "issued": issued}
        if flops := rank.notes.get("flops"):
            found["flops"] = {**flops, "ratio": flops["deepspeed"] / flops["ours"]}
    if host := read_json(RunDir(run_dir).profile / "host.json"):
        found["host"] = host
    return found


def checks_text(found: dict[str, Any]) -> str:
    """A sentence on each."""
    lines = []
    if collectives := found.get("collectives"):
        lines.append(f"DeepSpeed's own logger counted {collectives['logged']} of the {collectives['issued']:g} "
                     "collectives of rank 0's step; what it leaves out is not called through DeepSpeed.")
    if flops := found.get("flops"):
        lines.append(f"DeepSpeed's FLOPs profiler counted {flops['deepspeed']:.6g} in the products of rank 0's "
                     f"forward passes, {flops['ratio']:.4f} times our {flops['ours']:.6g}."
                     + _why_more(flops["ratio"]))
    if host := found.get("host"):
        whole = sum(host.values())
        shares = ", ".join(f"{seconds / whole:.1%} {name}" for name, seconds in
                           sorted(host.items(), key=lambda one: -one[1]) if name != _TORCH)
        lines.append(f"pyinstrument found rank 0 {host[_TORCH] / whole:.1%} of its time in torch, and outside of "
                     f"it: {shares} (profile/host.html).")
    return "".join(f"  {line}\n" for line in ["Checks by other tools:", *lines]) if lines else ""


def _why_more(ratio: float) -> str:
    if ratio < 1.001:
        return ""
    return (" It also counts products of the backward pass that are made in a forward pass: the head's where the "
            "loss is taken in chunks, and activations that are computed again.")
