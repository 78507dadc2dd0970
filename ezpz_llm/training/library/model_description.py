"""Description of a script's model for its checkpoints, so that they can be exported without the script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ezpz_llm.core.base import UserError, parse_json
from ezpz_llm.training.checkpoint.script_model import ScriptModel

_EXTRA_STATE = "_extra_state"
"""Last component of the state_dict key for a module's extra state (torch/nn/modules/module.py)."""


def describe_model(module: nn.Module) -> ScriptModel:
    """Return the description of a wrapped module."""
    config = _read_config(module.config, use_diff=False) if _is_hugging_face(module) else None
    generation = getattr(module, "generation_config", None)
    return ScriptModel(
        class_name=_class_name(module), config=config,
        generation_config=None if config is None or generation is None else _read_config(generation),
        tied=_tied_names(module, {} if config is None else getattr(module, "all_tied_weights_keys", {})),
        extra_state=tuple(f"{name}.{_EXTRA_STATE}".removeprefix(".") for name, part in module.named_modules()
                          if type(part).get_extra_state is not nn.Module.get_extra_state))


def _class_name(module: nn.Module) -> str:
    """Return the name of the user's class; fully_shard replaces it with a subclass."""
    return next(kind.__name__ for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def _is_hugging_face(module: nn.Module) -> bool:
    """Return True for models of transformers, without importing it.

    Names of weights in a model with adapters of PEFT are not those that `from_pretrained` expects.
    """
    return (any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__)
            and not getattr(module, "_hf_peft_config_loaded", False))


def _read_config(config: Any, **options: Any) -> dict[str, Any] | None:
    """Return the content of the file that `save_pretrained` writes; None if a value cannot be written as JSON."""
    try:
        return parse_json(config.to_json_string(**options), "config.json")
    except (TypeError, ValueError, UserError):
        return None


def _tied_names(module: nn.Module, restored: Mapping[str, str]) -> dict[str, str]:
    """Return the stored name of each additional name of a parameter.

    Args:
        restored: names that transformers ties when it loads the model, each with the name to tie it to.
    """
    first: dict[nn.Parameter, str] = {}
    names = {name: first.setdefault(parameter, name)
             for name, parameter in module.named_parameters(remove_duplicate=False)}
    return {name: stored for name, stored in names.items() if name != stored and restored.get(name) != stored}
