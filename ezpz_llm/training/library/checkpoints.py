"""Checkpoints of a script's models: saving and loading under any layout."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import UserError
from ezpz_llm.core.base.records import as_plain
from ezpz_llm.training.checkpoint.manifest import complete_checkpoints
from ezpz_llm.training.dist.agreement import broadcast, run_together
from ezpz_llm.training.library.run import current
from ezpz_llm.training.library.script_models import ScriptModels, access_of
from ezpz_llm.training.library.stored_values import from_json, to_json
from ezpz_llm.training.library.wrapped import Wrapped

Models = Wrapped | Mapping[str, Wrapped]
"""A model, or several by name."""
_MAX_STEP = 10**12
_SAVED: dict[int, weakref.WeakSet[Wrapped]] = {}
"""Models of this process in the last checkpoint of each step."""


def save_checkpoint(model: Models, step: int, **state: Any) -> Path:
    """Write a checkpoint to the run directory atomically, in the trainer's format. Collective.

    The checkpoint contains fp32 weights, optimizer state, rank 0's buffers, the random state of each rank, and
    `state`. Any layout can load it, on any number of ranks.

    Args:
        model: a wrapped model, or several models by name, such as {"generator": g, "critic": c}.
        step: last finished step.
        state: values that the script needs to resume, such as the epoch or a scheduler's state_dict: numbers, text,
            lists, tuples, dictionaries, NumPy arrays, tensors. Rank 0's values are saved.

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: there is no run, the state of an optimizer or a value of `state` cannot be stored, a step is
            incomplete, another model was saved at this step, or writing failed. Raised on all ranks. Nothing is
            written then.
    """
    run = current("save_checkpoint")
    models = _by_name(model)

    def check() -> dict[str, Any]:
        """Check everything that can be checked before writing, and return the state as JSON."""
        _check_step(step)
        _check_between_steps(models, "ezpz_llm.save_checkpoint")
        for saved in models.values():
            access_of(saved.optimizer).check_supported()
        own = {id(saved) for saved in models.values()}
        if any(id(saved) not in own for saved in _SAVED.get(int(step), ())):
            raise UserError(f"another model was saved at step {int(step)}", where="ezpz_llm.save_checkpoint",
                            instead='one call for all models: save_checkpoint({"generator": g, "critic": c}, step)')
        return to_json(state, "state")

    stored = run_together(run.dist, check)
    run.flush()  # a run that is resumed from this checkpoint begins with its step
    with run.phase("checkpoints"):
        folder = ScriptModels(models, run.dist).save(run.dist.run_dir, int(step), stored)
    _SAVED[int(step)] = weakref.WeakSet(models.values())
    return folder


def _by_name(model: Models) -> Mapping[str, Wrapped]:
    """Return the models by name; "" for a single one.

    Raises:
        UserError: a value is not a wrapped model, or a name is not one.
    """
    models = {"": model} if isinstance(model, Wrapped) else model
    where = "ezpz_llm.save_checkpoint and load_checkpoint"
    if not isinstance(models, Mapping) or not models:
        raise UserError(f"a model of type {type(model).__name__}", where=where,
                        instead="the result of ezpz_llm.wrap, or a dictionary of them")
    for name, value in models.items():
        if not isinstance(value, Wrapped):
            raise UserError(f"a model of type {type(value).__name__}", where=where,
                            instead="the result of ezpz_llm.wrap")
        if value is not model and (not isinstance(name, str) or not name.isidentifier()):
            raise UserError(f"the model name {name!r}", where=where,
                            instead="letters, digits and _, such as critic")
    return models


def _check_step(step: Any) -> None:
    if isinstance(step, bool) or not hasattr(step, "__index__") or not 0 <= int(step) <= _MAX_STEP:
        raise UserError(f"the step is {step!r}", where="ezpz_llm.save_checkpoint",
                        instead=f"the number of the last finished step, from 0 to {_MAX_STEP}")


def _check_between_steps(models: Mapping[str, Wrapped], where: str) -> None:
    if any(model.is_accumulating for model in models.values()):
        raise UserError("some micro-batches of a step have been computed, but checkpoints do not contain gradients",
                        where=where, instead="save_checkpoint right after a model.step() that has updated weights")


def load_checkpoint(model: Models, where: str | Path | None = None) -> dict[str, Any] | None:
    """Load the newest intact checkpoint of a run directory, or a given checkpoint. Collective.

    Restores the learning rate and other numbers of the optimizers' parameter groups, if the number of groups is the
    same. A scheduler needs its own `load_state_dict`. Gradients since the last step are discarded.

    `record` continues after the checkpoint's step. A warning names newer checkpoints that are damaged.

    Args:
        model: as in `save_checkpoint`, with the same names.
        where: a run directory or a checkpoint's folder; by default this run's directory.

    Returns:
        The `state` of `save_checkpoint`, with "step" and properties of the run that saved it. None if `where` is
        not given and this run has no checkpoint; then metrics of an earlier attempt are renamed.

    Raises:
        UserError: `where` has no checkpoint, the model or its optimizer differs, or all checkpoints are damaged; on
            all ranks.
    """
    run = current("load_checkpoint")
    models = _by_name(model)
    if where is None:
        if not broadcast(run.dist, bool(complete_checkpoints(run.dist.run_dir.checkpoints))):
            run.start_over()
            return None
        where = run.run_dir
    run_together(run.dist, lambda: _check_path(Path(where)), on_main=True)

    with run.phase("checkpoints"):
        loaded = ScriptModels(models, run.dist).load(where)
    if run.is_main:
        for error in loaded.skipped:
            print(f"warning: {error.found} ({error.where}); loading {loaded.folder.name} instead", file=sys.stderr,
                  flush=True)
    run.rewind(loaded.state.step)
    saved = as_plain(loaded.state)
    for key in ("param_groups", "models", "optimizers", "numbers"):
        saved.pop(key, None)
    user = from_json(saved.pop("user", {}))
    return {**saved, **user, "rng_restored": loaded.rng_restored}


def _check_path(where: Path) -> None:
    if not where.is_dir():
        raise UserError(f"no run directory or checkpoint at {where}", where="ezpz_llm.load_checkpoint",
                        instead="a run directory, or a checkpoints/step-… folder in one")
