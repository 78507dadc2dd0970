"""Type of a checkpoint's state.json, and its reader (imports no torch)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from ezpz_llm.core.base import UserError, as_dataclass
from ezpz_llm.core.base.records import Ranks, Step, Whole, as_record
from ezpz_llm.training.checkpoint.manifest import STATE, damaged_error, read_json
from ezpz_llm.training.checkpoint.script_model import ScriptModel
from ezpz_llm.training.data.manifest import TokenizerEntry
from ezpz_llm.training.engine.loss_scale_state import LossScaleState
from ezpz_llm.training.model.config import ModelConfig

_Hash = Annotated[str, Meta(pattern="^[0-9a-f]*$")]


class Progress(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of a run that the caller of `save` passes.

    Attributes:
        data: fingerprint of the token shards.
        tokenizer: its entry in the manifest of the token shards.
        model: settings of the model, by name; see `ezpz_llm.training.model.config.ModelConfig`.
        hf_config: settings of a script's Hugging Face model; see `ezpz_llm.training.library.hf_settings`.
        guard: state of the spike detector.
        callbacks: states of other callbacks, by name.
        models: a script's models by name, which is the prefix of their parameters; "" for a single model.
        user: values that a user's script saves, by name.
        param_groups: hyperparameters of the groups of a script's optimizers, by model.
        optimizers: classes of a script's optimizers, by model.
        numbers: single numbers in the optimizer's state of a script's parameters, such as Adam's step, by name.
    """

    step: Step
    consumed: Whole | None = None
    sample_hash: _Hash | None = None
    seed: Whole | None = None
    data: str | None = None
    tokenizer: TokenizerEntry | None = None
    model: dict[str, Any] | None = None
    hf_config: dict[str, Any] | None = None
    models: dict[str, ScriptModel] = {}
    guard: dict[str, Any] | None = None
    callbacks: dict[str, dict[str, Any]] = {}
    user: dict[str, Any] = {}
    param_groups: dict[str, list[dict[str, Any]]] = {}
    optimizers: dict[str, str] = {}
    numbers: dict[str, dict[str, float]] = {}

    @property
    def callback_states(self) -> dict[str, dict[str, Any]]:
        """States of all callbacks, by name."""
        return self.callbacks if self.guard is None else {**self.callbacks, "guard": self.guard}


class Point(Struct, frozen=True):
    """Checkpoint of a run by its branch and step; see `ezpz_llm.training.checkpoint.chain`."""

    branch: Whole
    step: Step


class State(Progress, frozen=True, kw_only=True, omit_defaults=True):
    """Content of state.json: the progress, and members that `save` adds.

    Attributes:
        branch: number of the run's branch.
        continues: last checkpoint of each earlier branch, and the one before this one.
    """

    optimizer_step: Step
    loss_scale: LossScaleState | None
    world_size: Ranks
    layout: str | None = None
    degrees: dict[str, Whole] = {}
    versions: dict[str, str] = {}
    branch: Whole = 0
    continues: list[Point] = []

    @property
    def is_of_script(self) -> bool:
        """True if a script's training loop saved the checkpoint, False if the trainer did."""
        return self.model is None and self.sample_hash is None

    @property
    def script_models(self) -> dict[str, ScriptModel]:
        """Models of a script by name; one of an unknown class if the checkpoint describes none."""
        return self.models or {"": ScriptModel()}

    def config(self, folder: Path) -> ModelConfig:
        """Return the configuration of the model.

        Raises:
            DamagedCheckpointError: it is missing.
            UserError: this version does not support it.
        """
        if self.model is None:
            raise damaged_error(folder, f"{STATE} has no model")
        try:
            return as_dataclass(ModelConfig, self.model, STATE)
        except UserError as error:
            raise UserError(f"{STATE} does not describe a model that this version supports: {error.found}",
                            where=str(folder), instead="the version that saved it") from error


def read_state(folder: Path) -> State:
    """Return the content of a checkpoint's state.json.

    Raises:
        DamagedCheckpointError: it is missing, or a value is missing or has the wrong type.
    """
    stored = read_json(folder / STATE)
    try:
        return as_record(State, stored, STATE)
    except UserError as error:
        raise damaged_error(folder, f"in {STATE}, {error.found}") from error
