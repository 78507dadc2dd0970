"""Settings of a Hugging Face model that determine its outputs: saved in checkpoints and compared on loading."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from ezpz_llm.core.base import UserError, parse_json, shorten_value

_MAY_CHANGE = {
    "_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "id2label",
    "label2id", "problem_type", "return_dict", "output_attentions", "output_hidden_states", "initializer_range",
    "chunk_size_feed_forward", "pretraining_tp", "max_position_embeddings", "pad_token_id", "bos_token_id",
    "eos_token_id", "sep_token_id", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens",
    "begin_suppress_tokens", "bad_words_ids", "tokenizer_class", "task_specific_params"}
"""Keys that do not change the outputs of a model with given weights in training. Shapes show the context length of
learned positions; rotary embeddings allow any. Not `decoder_start_token_id`: the decoder's inputs begin with it."""


def hf_settings(model: nn.Module) -> dict[str, Any] | None:
    """Return the settings of a Hugging Face model; None for other models.

    Nested settings have names such as "rope_parameters.rope_theta". Values that are not JSON are skipped.
    """
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    stored = to_dict() if callable(to_dict) else None
    if not isinstance(stored, dict) or "transformers_version" not in stored:
        return None
    return dict(_flatten(stored))


def check_hf_settings(saved: dict[str, Any] | None, model: nn.Module, folder: Path) -> None:
    """Compare a checkpoint's settings with those of the model that loads it.

    Settings that only one of them has are ignored, since versions of transformers have different ones.

    Raises:
        UserError: a setting differs.
    """
    settings = hf_settings(model) or {}
    for name, before in (saved or {}).items():
        if name in settings and not _is_same(settings[name], before):
            was = shorten_value(before)
            raise UserError(f"the checkpoint is of another model: {name} is {was} in the checkpoint and "
                            f"{shorten_value(settings[name])} in model.config", where=str(folder),
                            instead=f"create the model from a configuration with {name} {was}")


def _is_same(value: Any, saved: Any) -> bool:
    """Return True for equal JSON values. NaN is equal to NaN."""
    if isinstance(value, list) and isinstance(saved, list):
        return len(value) == len(saved) and all(map(_is_same, value, saved))
    return bool(value == saved or (value != value and saved != saved))


def _flatten(stored: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings that may not change, also those of nested configurations."""
    for key, value in stored.items():
        name = str(key)
        if name in _MAY_CHANGE or "drop" in name:
            continue
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
            continue
        try:
            text = json.dumps(value)
        except TypeError:  # an object, whose text may contain its address
            continue
        # JSON turns tuples into lists, so that saved settings are equal to those of the same model.
        yield f"{prefix}{name}", parse_json(text, "model.config")
