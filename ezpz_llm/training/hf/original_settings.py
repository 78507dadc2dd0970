"""Settings of published weights that training does not change, for an export after fine-tuning (no torch)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import UserError, read_json
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.training.hf.source import CONFIG, Source, find_source
from ezpz_llm.training.hf.tokenizer import entry_of

_GENERATION_CONFIG = "generation_config.json"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LONGEST_ANCESTRY = 20


def keep_original_settings(source: Source, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Copy generation_config.json of the weights that training began with to the folder of an export.

    Returns:
        Members of their config.json to keep: the context that rotary positions allow, and the ids of special tokens
        if the tokenizer is the same. And notes for the user.
    """
    origin = source
    for _ in range(_LONGEST_ANCESTRY):
        if origin.kind != "checkpoint":
            break
        began_with = read_record(RunDir(origin.folder.parent.parent)).settings.init_from
        if began_with is None:
            return {}, []
        try:
            origin = find_source(began_with, "--init-from")
        except UserError:
            return {}, ["max_position_embeddings and the ids of special tokens are those of the training, without "
                        f"{_GENERATION_CONFIG}: the weights that training began with are not at {began_with}"]
    if origin.kind != "hf":
        return {}, []
    kept, notes = {}, []
    stored = read_json(origin.folder / CONFIG)
    context, trained = origin.model.block_size, source.model.block_size
    if context > trained and source.model.position == "rope":
        kept["max_position_embeddings"] = context
        notes.append(f"max_position_embeddings stays {context}, though the training had a context of {trained}")
    elif context != trained:
        notes.append(f"the context is now {trained}; that of {origin.folder} is {context}")
    own, used = entry_of(origin), entry_of(source)
    if origin is not source and (own is None or used is None or not own.has_same_ids(used)):
        return kept, [*notes, f"the ids of special tokens and {_GENERATION_CONFIG} of {origin.folder} are not "
                              "kept, since the tokenizer is another one"]
    kept.update({name: stored[name] for name in _TOKENS if name in stored})
    if (origin.folder / _GENERATION_CONFIG).is_file():
        shutil.copyfile(origin.folder / _GENERATION_CONFIG, folder / _GENERATION_CONFIG)
    return kept, notes
