"""Switches that changed nothing: a run whose first losses equal another's to the last bit (imports no torch)."""

from __future__ import annotations

from typing import Any

from ezpz_llm.base.errors import UserError
from ezpz_llm.rundir import RunDir, read_layout, read_lines, read_record

SWITCHES = ("precision", "compile", "attention", "optimizer")
"""Settings that compute the same by other arithmetic: rounding shows whether they were at work."""
COMPARED = 10
"""Losses from the first on that have to be equal."""
_NEWEST = 100
_DECISIVE = ("layout", "batch", "clip")
_REST = ("corpus", "tokenizer", "init_from", "lr", "schedule", "min_lr", "warmup_steps", "warmup_type",
         "warmup_min_lr", "decay_steps", "wsd_decay_steps", "beta1", "beta2", "eps", "weight_decay",
         "loss_chunk", "z_loss", "overfit_one_batch", "seed", "device")


def without_effect(run_dir: RunDir) -> list[str]:
    """What to say of runs beside this one that differ from it in one switch, and not in their first losses.

    Only the newest neighbours are looked at, and only runs from their first step on.
    """
    ours = _identity(run_dir)
    if ours is None:
        return []
    others = sorted(run_dir.path.parent.glob("*/run.json"), key=lambda path: -path.stat().st_mtime)
    told = []
    for other in (path.parent for path in others[:_NEWEST]):
        if other.resolve() == run_dir.path.resolve():
            continue
        theirs = _identity(RunDir(other))
        if theirs is None or theirs.rest != ours.rest or theirs.losses != ours.losses:
            continue
        names = [name for name in SWITCHES if theirs.switches[name] != ours.switches[name]]
        if len(names) == 1:
            name = names[0]
            told.append(f"{name} {ours.switches[name]} had no effect: the first {COMPARED} losses equal those of "
                        f"{other.name}, with {name} {theirs.switches[name]}, to the last bit")
    return told


class _Run:
    """A run as far as it can be compared."""

    def __init__(self, record: dict[str, Any], layout: dict[str, Any], losses: list[float]) -> None:
        config = record["config"]
        self.losses = losses
        self.switches = {**{name: config.get(name) for name in SWITCHES}, "precision": record["precision"]}
        self.rest = [{name: config.get(name) for name in _REST}, record["model"],
                     {name: layout.get(name) for name in _DECISIVE}]


def _identity(run_dir: RunDir) -> _Run | None:
    """None for what is not the record of a run from its first step on, of enough steps."""
    lines: list[dict[str, Any]] = []
    try:
        record, layout = read_record(run_dir), read_layout(run_dir.layout) or {}
        for line in read_lines(run_dir.metrics):
            lines.append(line)
            if len(lines) == COMPARED:
                break
        losses = [line["loss"] for line in lines]
        if [line["step"] for line in lines] != list(range(1, COMPARED + 1)) or None in losses:
            return None
        return _Run(record, layout, losses)
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None  # another program's folder, or a run that has only begun
