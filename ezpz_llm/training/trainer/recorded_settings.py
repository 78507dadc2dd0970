"""Settings of a run as run.json records them, with absolute paths (imports no torch)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ezpz_llm.core.base import user_path
from ezpz_llm.training.data.mixture import absolute_corpus
from ezpz_llm.training.data.tokenizers import TOKENIZERS
from ezpz_llm.training.layout.ds_config import names
from ezpz_llm.training.trainer.config import TrainConfig


def recorded_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings by name, with absolute paths, so that a run can be resumed from any working directory."""
    settings = asdict(config)
    settings["corpus"] = absolute_corpus(config.corpus)
    if config.init_from is not None and user_path(config.init_from).is_dir():  # otherwise a hub id
        settings["init_from"] = _absolute(config.init_from)
    if config.tokenizer is not None and config.tokenizer not in TOKENIZERS:
        settings["tokenizer"] = _absolute(config.tokenizer)
    if config.ds_config not in names():
        settings["ds_config"] = _absolute(config.ds_config)
    for name in ("hellaswag", "nvme_path", "resume"):
        if settings[name] is not None:
            settings[name] = _absolute(settings[name])
    return settings


def _absolute(path: str) -> str:
    return str(user_path(path).absolute())
