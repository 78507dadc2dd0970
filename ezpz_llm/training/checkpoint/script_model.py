"""Models of a script in its checkpoint: their descriptions and parameters (imports no torch)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from ezpz_llm.training.checkpoint.index import Index, Parameter
from ezpz_llm.training.checkpoint.manifest import STATE, damaged_error


class ScriptModel(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Description of a script's model in state.json.

    Attributes:
        class_name: name of the module's class.
        config: content of the config.json of a Hugging Face model; None for other modules.
        generation_config: content of its generation_config.json, if it has one.
        tied: additional names of tied parameters, each with the name under which the parameter is stored. Without
            those that transformers ties itself.
        extra_state: keys of the module's state_dict for extra state, which checkpoints do not contain.
    """

    class_name: str = "module of an unknown class"
    config: dict[str, Any] | None = None
    generation_config: dict[str, Any] | None = None
    tied: dict[str, str] = {}
    extra_state: tuple[str, ...] = ()


def prefix_of(name: str) -> str:
    """Return the prefix of a model's parameters and buffers in a checkpoint, which is empty for a single one."""
    return f"{name}." if name else ""


def parameters_of(index: Index, name: str, model: ScriptModel, folder: Path) -> dict[str, Parameter]:
    """Return the parameters of a script's model by each of their names.

    Args:
        name: name of the model; "" for a single one.
        folder: the checkpoint's folder, for messages.

    Raises:
        DamagedCheckpointError: a parameter that has additional names is missing.
    """
    prefix = prefix_of(name)
    parameters = {key.removeprefix(prefix): parameter for key, parameter in index.parameters.items()
                  if key.startswith(prefix)}
    for alias, stored in model.tied.items():
        if stored not in parameters:
            raise damaged_error(folder, f"{STATE} ties {alias} to {stored}, which is missing")
    return {**parameters, **{alias: parameters[stored] for alias, stored in model.tied.items()}}
