"""Settings of a Hugging Face model that are compared when a checkpoint is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from ezpz_llm.core.base import UserError, parse_json
from ezpz_llm.training.library.hf_settings import check_hf_settings, hf_settings


def model_with(**settings: Any) -> nn.Module:
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(to_dict=lambda: {"transformers_version": "5", **settings})  # type: ignore[assignment]
    return model


def load(saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Compare settings as `load_checkpoint` does, with those of a checkpoint on disk."""
    settings = parse_json(json.dumps(hf_settings(model_with(**saved))), "state.json")
    check_hf_settings(settings, model_with(**given), Path("checkpoint"))


@pytest.mark.parametrize(("saved", "given"), [
    ({"eos_token_id": 2, "bos_token_id": 1, "sep_token_id": None}, {"eos_token_id": [2, 7], "bos_token_id": 0,
                                                                    "sep_token_id": 3}),
    ({"forced_eos_token_id": 2, "bad_words_ids": [[1]]}, {"forced_eos_token_id": None, "bad_words_ids": None}),
    ({"scale": float("nan"), "limits": [[float("nan")], 1]},
     {"scale": float("nan"), "limits": [[float("nan")], 1]}),
    ({"hook": object(), "hooks": [object()], "inner": {"hook": object()}},
     {"hook": object(), "hooks": [object()], "inner": {"hook": object()}}),
    ({"hook": object(), "sizes": (1, 2), "heads": {1: 4}}, {"hook": 5, "sizes": (1, 2), "heads": {1: 4}}),
])
def test_settings_that_do_not_change_outputs_load(saved: dict[str, Any], given: dict[str, Any]) -> None:
    load(saved, given)


@pytest.mark.parametrize(("saved", "given", "name"), [
    ({"decoder_start_token_id": 0}, {"decoder_start_token_id": 1}, "decoder_start_token_id"),
    ({"scale": float("nan")}, {"scale": 1.0}, "scale"),
    ({"limits": [1, float("nan")]}, {"limits": [2, float("nan")]}, "limits"),
    ({"limits": [1, 2]}, {"limits": [1]}, "limits"),
    ({"hook": object(), "sizes": (1, 2)}, {"hook": object(), "sizes": (1, 3)}, "sizes"),
    ({"heads": {1: 4}}, {"heads": {1: 2}}, r"heads\.1"),
])
def test_settings_that_change_outputs_are_rejected(saved: dict[str, Any], given: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError, match=f"the checkpoint is of another model: {name} is"):
        load(saved, given)
