"""Checkpoints of a script's models: saving and loading under any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ezpz_llm.base import UserError
from ezpz_llm.base.records import as_plain
from ezpz_llm.checkpoint.manifest import complete_checkpoints
from ezpz_llm.checkpoint.reader import load_newest
from ezpz_llm.checkpoint.saver import save
from ezpz_llm.checkpoint.state import Progress
from ezpz_llm.dist.agreement import broadcast, run_together
from ezpz_llm.library.hf_settings import check_hf_settings, hf_settings
from ezpz_llm.library.model_description import describe_model
from ezpz_llm.library.run import current
from ezpz_llm.library.wrapping import Wrapped


def save_checkpoint(model: Wrapped, step: int, **state: Any) -> Path:
    """Write a checkpoint to the run directory atomically, in the trainer's format. Collective.

    The checkpoint contains fp32 weights, optimizer state, rank 0's buffers, the random state of each rank, and
    `state`. Any layout can load it, on any number of ranks.

    Args:
        step: last finished step.
        state: JSON values that the script needs to resume, such as the epoch; rank 0's values are saved.

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: there is no run, the optimizer is not supported, or writing failed. Raised on all ranks.
    """
    run = current("save_checkpoint")
    _require_known_state(model.optimizer)
    with run.phase("checkpoints"):
        return save(model.engine, run.dist, run.dist.run_dir,
                    Progress(step=step, hf_config=hf_settings(model.module), user=state,
                             models={"": describe_model(model.module)},
                             param_groups=[_hyperparameters(group) for group in model.optimizer.param_groups]))


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of an optimizer's parameter group, and its tuples of numbers such as betas.

    Flags such as `fused` depend on the device, so the script sets them.
    """
    plain = {name: value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
             for name, value in group.items() if name != "params"}
    return {name: value for name, value in plain.items()
            if all(map(_is_number, value if isinstance(value, tuple) else (value,)))}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _restore_hyperparameters(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Set saved hyperparameters, as `load_state_dict` of torch's optimizers does: schedulers continue from lr."""
    if len(groups) != len(optimizer.param_groups):
        return
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for name, value in saved.items():
            if isinstance(group.get(name), Tensor):
                group[name].fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value


def load_checkpoint(model: Wrapped, where: str | Path | None = None) -> dict[str, Any] | None:
    """Load the newest intact checkpoint of a run directory, or a given checkpoint. Collective.

    Restores the learning rate and other numbers of the optimizer's parameter groups, if the number of groups is the
    same. A scheduler needs its own `load_state_dict`.

    `record` continues after the checkpoint's step.

    Args:
        where: a run directory or a checkpoint's folder; by default this run's directory.

    Returns:
        The `state` of `save_checkpoint`, with "step" and properties of the run that saved it. None if `where` is
        not given and this run has no checkpoint.

    Raises:
        UserError: `where` has no checkpoint, the model differs, or all checkpoints are damaged; on all ranks.
    """
    run = current("load_checkpoint")
    _require_known_state(model.optimizer)
    if where is None:
        if not broadcast(run.dist, bool(complete_checkpoints(run.dist.run_dir.checkpoints))):
            return None
        where = run.run_dir
    run_together(run.dist, lambda: _check_path(Path(where)), on_main=True)
    loaded = load_newest(where, model.engine, run.dist,
                         lambda folder, state: check_hf_settings(state.hf_config, model.module, folder))
    _restore_hyperparameters(model.optimizer, loaded.state.param_groups)
    run.step = loaded.state.step
    run.begin_step()
    saved = as_plain(loaded.state)
    for name in ("param_groups", "models"):
        saved.pop(name, None)
    return {**saved, **saved.pop("user", {}), "rng_restored": loaded.rng_restored}


def _check_path(where: Path) -> None:
    if not where.is_dir():
        raise UserError(f"no run directory or checkpoint at {where}", where="ezpz_llm.load_checkpoint",
                        instead="a run directory, or a checkpoints/step-… folder in one")


def has_known_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for torch's Adam and AdamW without amsgrad, whose state checkpoints support."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not any(
        group.get("amsgrad") for group in optimizer.param_groups)


def _require_known_state(optimizer: torch.optim.Optimizer) -> None:
    if not has_known_state(optimizer):
        raise UserError(f"checkpoints do not support the state of {type(optimizer).__name__}",
                        where="ezpz_llm.save_checkpoint", instead="torch.optim.AdamW or Adam, without amsgrad")
