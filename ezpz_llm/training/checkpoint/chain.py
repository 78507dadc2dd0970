"""Chain of a run's checkpoints: the earlier ones that each continues from (imports no torch).

A run begins a branch when it starts, resumes or rolls back, and numbers its branches. state.json has the number,
and in `continues` the last step of each branch that the checkpoint continues from; the last entry is the checkpoint
before it. So the chain is known even after some of its checkpoints were removed. Other checkpoints are abandoned.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ezpz_llm.core.base import UserError, print_lines
from ezpz_llm.training.checkpoint.manifest import LATEST, complete_checkpoints, point_latest, step_of
from ezpz_llm.training.checkpoint.state import Point, State, read_state

if TYPE_CHECKING:
    from ezpz_llm.training.dist import Dist


@dataclass(frozen=True)
class ChainPosition:
    """Position of a run in the chain in the folder `checkpoints`; `branch` is None before its first save."""

    checkpoints: Path
    branch: int | None = None
    continues: tuple[Point, ...] = ()


def on_chain(folders: Sequence[Path], newest: Path | None) -> list[Path]:
    """Return the folders that are not known to be abandoned by `newest`, by descending step.

    If the state of `newest` is missing or damaged, the folder that was saved last determines the chain.
    """
    states = {folder: _try_read_state(folder) for folder in folders}
    head = None if newest is None else _try_read_state(newest)
    if head is None:
        readable = [state for state in states.values() if state is not None]
        head = max(readable, key=lambda state: (state.branch, state.step), default=None)
    chain = [folder for folder, state in states.items() if state is None or head is None or _follows(head, state)]
    return sorted(chain, key=step_of, reverse=True)


def continue_from(dist: Dist, folder: Path, state: State) -> None:
    """Start a branch at a loaded checkpoint; rank 0 calls this. `latest` then names it, if it is of this run."""
    checkpoints = dist.run_dir.checkpoints
    is_own = folder.resolve().parent == checkpoints.resolve()
    dist.chain_position = ChainPosition(checkpoints, continues=_points(state) if is_own else ())
    if is_own:
        try:
            point_latest(folder)
        except OSError as error:  # saving reports a full disk; training can start
            print_lines(f"warning: {checkpoints / LATEST} cannot be updated: {error.strerror}", file=sys.stderr)


def place(dist: Dist, checkpoints: Path, state: State) -> State:
    """Return the state of a checkpoint with its branch and the points that it continues from."""
    position: ChainPosition | None = dist.chain_position
    if position is None or position.checkpoints != checkpoints:
        position = ChainPosition(checkpoints)
    branch = position.branch
    if branch is None:
        states = map(_try_read_state, complete_checkpoints(checkpoints))
        branch = 1 + max((state.branch for state in states if state is not None), default=0)
    return replace(state, branch=branch, continues=list(position.continues))


def continue_branch(dist: Dist, checkpoints: Path, state: State) -> None:
    """Continue the run's branch after the checkpoint of `state` was saved."""
    dist.chain_position = ChainPosition(checkpoints, state.branch, _points(state))


def _points(state: State) -> tuple[Point, ...]:
    """Return the points that the next checkpoint continues from."""
    return (*(point for point in state.continues if point.branch != state.branch), Point(state.branch, state.step))


def _follows(head: State, state: State) -> bool:
    return any(state.branch == point.branch and state.step <= point.step for point in _points(head))


def _try_read_state(folder: Path) -> State | None:
    try:
        return read_state(folder)
    except UserError:
        return None
