"""Checkpoints of one or several wrapped models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ezpz_llm.core.base import UserError
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training.checkpoint.index import WEIGHT, Index
from ezpz_llm.training.checkpoint.reader import Loaded, load_newest
from ezpz_llm.training.checkpoint.saver import save
from ezpz_llm.training.checkpoint.script_model import prefix_of
from ezpz_llm.training.checkpoint.state import Progress, State
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.engine.optimizer_state import Access, EngineState, Slice
from ezpz_llm.training.layout.layout import Layout
from ezpz_llm.training.library.hf_settings import check_hf_settings, hf_settings
from ezpz_llm.training.library.model_description import describe_model
from ezpz_llm.training.library.script_state import Numbers, ScriptState
from ezpz_llm.training.library.wrapped import Wrapped


class ScriptModels:
    """Models of a script, by name; a single model has the name "".

    Attributes:
        module: the module, or a dictionary of modules, so that names of buffers begin with the model's name.
        layout: layout of the first model, which the checkpoint names.
    """

    def __init__(self, models: Mapping[str, Wrapped], dist: Dist) -> None:
        first = next(iter(models.values()))
        self.models, self._dist = models, dist
        self.layout: Layout = first.engine.layout
        self.device: torch.device = first.engine.device
        self.module = first.module if "" in models else nn.ModuleDict(
            {name: model.module for name, model in models.items()})

    @cached_property
    def _state(self) -> ScriptTrainingState:
        return ScriptTrainingState(self.models, self._dist)

    def training_state(self) -> ScriptTrainingState:
        """Return the training state of all models, at the first call. Collective."""
        return self._state


    def save(self, run_dir: RunDir, step: int, user: dict[str, Any]) -> Path:
        """Write a checkpoint, and return its folder. Collective.

        Args:
            user: the script's state, as JSON.
        """
        return save(self, self._dist, run_dir, Progress(
            step=step, user=user, hf_config=hf_settings(self.module),
            models={name: describe_model(model.module) for name, model in self.models.items()},
            param_groups={name: [_hyperparameters(group) for group in model.optimizer.param_groups]
                          for name, model in self.models.items()},
            optimizers={name: type(model.optimizer).__name__ for name, model in self.models.items()},
            numbers=self._state.numbers))

    def load(self, where: str | Path) -> Loaded:
        """Load the newest intact checkpoint of a run directory, or a given checkpoint. Collective.

        Raises:
            UserError: there is no intact checkpoint, or it is of other models or optimizers.
        """
        loaded = load_newest(where, self, self._dist, self._accept)
        for name, model in self.models.items():
            model.zero_grad()
            _restore_hyperparameters(model.optimizer, loaded.state.param_groups.get(name, ()))
        return loaded

    def _accept(self, folder: Path, state: State, index: Index, training: EngineState) -> None:
        """Check that a checkpoint is of these models and optimizers.

        Raises:
            UserError: it is not.
        """
        if "" in self.models:
            check_hf_settings(state.hf_config, self.module, folder)
        if state.models and state.models.keys() != self.models.keys():
            raise UserError(f"the checkpoint has {_named(state.models)}, not {_named(self.models)}",
                            where=str(folder), instead="load_checkpoint with the models of save_checkpoint")
        for name, saved in state.optimizers.items():
            if (own := type(self.models[name].optimizer).__name__) != saved:
                raise UserError(f"the checkpoint has the state of {saved}, not of {own}", where=str(folder),
                                instead=f"{saved}, or a new training from `ezpz-llm checkpoint export`")
        of_trainer = {} if state.optimizers else {"step": float(state.optimizer_step)}
        self._state.prepare(index, state.numbers, of_trainer)


class ScriptTrainingState(EngineState):
    """Training state of models whose optimizers have any state per parameter.

    Attributes:
        numbers: single numbers in the optimizer's state, by parameter.
    """

    def __init__(self, models: Mapping[str, Wrapped], dist: Dist) -> None:
        first = next(iter(models.values())).engine.training_state()
        super().__init__(first.optimizer, first.scale)
        self._parts = {prefix_of(name): (model.engine.training_state(), access_of(model.optimizer))
                       for name, model in models.items()}
        self.shapes = {prefix + name: shape for prefix, (part, _) in self._parts.items()
                       for name, shape in part.shapes.items()}
        self.numbers: dict[str, Numbers] = {}
        self._creations: list[Callable[[], None]] = []
        for prefix, (part, access) in self._parts.items():
            part.adopt_parameters()
            self.numbers |= {prefix + name: numbers for name, numbers in access.collect(part, dist).items()}

    @property
    def kinds(self) -> dict[str, tuple[str, ...]]:
        """Kinds of tensors of each parameter."""
        return {prefix + name: kinds for prefix, (part, _) in self._parts.items()
                for name, kinds in part.kinds.items()}

    @property
    def frozen(self) -> list[str]:
        """Names of the parameters that the optimizers do not step."""
        return [prefix + name for prefix, (part, _) in self._parts.items() for name in part.frozen]

    def prepare(self, index: Index, numbers: Mapping[str, Numbers], default: Numbers) -> None:
        """Check that the optimizers have the state of a checkpoint, and let `slices` create it.

        Args:
            numbers: single numbers by parameter.
            default: numbers of the other parameters with state; those of a checkpoint of the trainer.

        Raises:
            UserError: an optimizer does not have the state.
        """
        self._creations = []
        for prefix, (part, access) in self._parts.items():
            kinds: dict[str, list[str]] = {}
            for name in part.shapes.keys() - set(part.frozen) if part.frozen else part.shapes:
                if (stored := index.parameters.get(prefix + name)) is not None:
                    kinds[name] = [kind for kind in index.kinds if kind != WEIGHT and kind not in stored.without]
            own = {name: numbers.get(prefix + name, default if kinds[name] else {}) for name in kinds}
            self._creations.append(access.prepare(part, kinds, own))

    def slices(self) -> Iterator[Slice]:
        """Yield the slices of all models."""
        for create in self._creations:
            create()
        self._creations = []
        return self._prefixed(lambda part: part.slices())

    def raw_slices(self) -> Iterator[Slice]:
        """Yield the slices of all models as stored."""
        return self._prefixed(lambda part: part.raw_slices())

    def _prefixed(self, slices_of: Callable[[EngineState], Iterable[Slice]]) -> Iterator[Slice]:
        return (replace(piece, name=prefix + piece.name) for prefix, (part, _) in self._parts.items()
                for piece in slices_of(part))

    def _slices(self, tensors_of: Access) -> Iterator[Slice]:
        return self._prefixed(lambda part: part._slices(tensors_of))

    def stepped(self) -> Iterator[tuple[torch.Tensor, list[str]]]:
        """Yield each tensor that an optimizer steps, with the names of its parameters."""
        return ((tensor, [prefix + name for name in names]) for prefix, (part, _) in self._parts.items()
                for tensor, names in part.stepped())

    @property
    def optimizer_step(self) -> int:
        """The largest step count of an optimizer."""
        return max(part.optimizer_step for part, _ in self._parts.values())

    def loaded(self, optimizer_step: int) -> None:
        """Update the engines after slices were loaded. Collective."""
        for part, _ in self._parts.values():
            part.refresh()  # each parameter has its own step count


def access_of(optimizer: torch.optim.Optimizer) -> ScriptState:
    """Return the access to the state of a wrapped model's optimizer, which `wrap` has set."""
    return optimizer.ezpz_state


def _named(models: Mapping[str, object]) -> str:
    return "a single model" if "" in models else f"the models {', '.join(sorted(models))}"


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
