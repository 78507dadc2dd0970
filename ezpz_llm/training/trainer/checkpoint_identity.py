"""Check that a checkpoint belongs to the run that resumes from it: same model, tokenizer, seed and tokens.

Imports no torch. Names and shapes of tensors do not show all of a model: 12 heads of 64 dimensions have the same
tensors as 6 heads of 128. Therefore state.json records every setting of the model.
"""

from __future__ import annotations

import json
from pathlib import Path

from ezpz_llm.core.base import UserError
from ezpz_llm.training.checkpoint.state import State
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.data.tokenizers import describe
from ezpz_llm.training.model.config import ModelConfig, differing_settings
from ezpz_llm.training.trainer.config import MODEL_OVERRIDES, RunConfig

_MAY_CHANGE = ("dropout", "init", "vocab_multiple")
"""Model settings that may differ between a checkpoint and the run. Loading compares the embedding's rows, which
`vocab_multiple` determines."""


def check_identity(config: RunConfig, model: ModelConfig, folder: Path, state: State,
                   tokens: TokenData | None = None) -> None:
    """Check that a run can resume from a checkpoint.

    Args:
        model: the run's model. Its vocabulary size is compared only if `tokens` are given.
        folder: the checkpoint's folder.
        state: content of its state.json.
        tokens: the run's tokens; None if they are not prepared yet.

    Raises:
        UserError: the seed, data, tokenizer or model differs, or the checkpoint's step is not below `--steps`.
    """
    check_origin(folder, state)
    if None in (state.consumed, state.sample_hash, state.seed, state.data):
        raise UserError("the checkpoint's state.json is incomplete", where=str(folder),
                        instead="resume from a checkpoint of ezpz_llm.train")
    if state.seed != config.seed:
        raise UserError(f"the checkpoint's seed is {state.seed}, this run's is {config.seed}: the order of "
                        "samples would change", where=str(folder),
                        instead="the same seed, or a new run without --resume")
    if tokens is not None:
        _check_tokens(config, tokens, folder, state)
    _check_model(config, model, folder, state.config(folder), knows_vocabulary=tokens is not None)
    if state.step >= config.steps:
        raise UserError(f"the checkpoint is of step {state.step}, but this run ends at step {config.steps}",
                        where=str(folder), instead=f"--steps {2 * state.step}, or any number above {state.step}")


def check_origin(folder: Path, state: State) -> None:
    """Check that the trainer saved a checkpoint.

    Raises:
        UserError: a script saved it.
    """
    if state.is_of_script:
        names = ", ".join(model.class_name for model in state.script_models.values())
        raise UserError(f"the checkpoint was saved by a script ({names}), so the trainer cannot resume it",
                        where=str(folder),
                        instead="resume in the script, with ezpz_llm.load_checkpoint; or start a new run from the "
                                f"weights, if the trainer supports the model: --init-from {folder}")


def _check_tokens(config: RunConfig, tokens: TokenData, folder: Path, state: State) -> None:
    # Equal tokens do not imply equal tokenizers: shards of other programs do not record which one made them.
    used, saved = tokens.manifest.tokenizer, state.tokenizer
    if saved is not None and not saved.has_same_ids(used):
        raise UserError(f"the checkpoint's tokenizer is {describe(saved)}, that of {config.corpus} is "
                        f"{describe(used)}: the same ids mean different text", where=str(folder),
                        instead="the tokenizer of the checkpoint's run, or a new run without --resume")
    if state.data != tokens.fingerprint:
        raise UserError(f"the tokens of {config.corpus} differ from the checkpoint's: the training "
                        "samples would change", where=str(folder),
                        instead="the text, tokenizer and validation split of the checkpoint's run, or a new run "
                                "without --resume")


def _check_model(config: RunConfig, model: ModelConfig, folder: Path, saved: ModelConfig, *,
                 knows_vocabulary: bool) -> None:
    # Rotary embeddings have no table, so they allow any context length.
    free = {*_MAY_CHANGE, *(() if knows_vocabulary else ("vocab_size",)),
            *(("block_size",) if model.position == "rope" else ())}
    for name in differing_settings(saved, model, free)[:1]:
        before = getattr(saved, name)
        raise UserError(f"the checkpoint is of another model: {name} is {before} in the checkpoint and "
                        f"{getattr(model, name)} in this run", where=str(folder),
                        instead=_advice(config, name, before))


def _advice(config: RunConfig, name: str, before: object) -> str:
    if name in MODEL_OVERRIDES and getattr(config, name) is not None:
        option = f"--{name.replace('_', '-')}"
        return f"omit {option}, or pass {option} {json.dumps(before)}"
    return "omit --model, since --resume restores the run's model, or start a new run without --resume"
