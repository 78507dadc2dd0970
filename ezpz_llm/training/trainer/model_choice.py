"""Model and tokenizer of a run: by name, or those of its initial weights (imports no torch)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePath

from ezpz_llm.core.base import UserError
from ezpz_llm.training.hf.source import Source, find_checkpoint, find_source, source_in, with_model_changes
from ezpz_llm.training.hf.tokenizer import tokenizer_argument_for
from ezpz_llm.training.layout.value_source import NOT_FROM_USER, Origin, ValueSource
from ezpz_llm.training.model.config import ModelConfig, differing_settings, get_model_config
from ezpz_llm.training.trainer.config import ADOPTS_VOCABULARY, MODEL_OVERRIDES, TrainConfig
from ezpz_llm.training.trainer.options import Options

WEIGHTS = ValueSource(Origin.WEIGHTS)
_NOT_SHAPE = ("block_size", "vocab_size", "vocab_multiple", "dropout", "init", "norm_eps")
"""Model fields that may differ between the initial weights and the model in `--model`."""


def choose_model(config: TrainConfig, named: bool) -> tuple[ModelConfig, str, Source | None]:
    """Return the model, its name, and the source of its initial weights (None for random ones, and on resume).

    Args:
        named: the model's name was set, by an option, file or preset.

    Raises:
        UserError: the name is unknown, the shape is invalid, or the shape differs from that of the weights.
    """
    overrides = {name: getattr(config, name) for name in MODEL_OVERRIDES}
    if config.init_from is None:
        return get_model_config(config.model, **overrides), config.model, None
    source = _weights_to_load(config.init_from, config.resume)
    if named:
        model = get_model_config(config.model, **overrides)
        for name in differing_settings(model, source.model, _NOT_SHAPE)[:1]:
            raise UserError(f"{config.model} is not the model of these weights: {name} is {getattr(model, name)} "
                            f"in the model and {getattr(source.model, name)} in the weights",
                            where=str(source.folder), instead="omit --model: the weights set the shape")
    name = config.model if named else PurePath(config.init_from).name or str(source.folder)
    model = with_model_changes(source.model, str(source.folder), **overrides)
    return model, name, source if config.resume is None else None


def _weights_to_load(init_from: str, resume: str | None) -> Source:
    """Return the source of the run's first weights: the checkpoint on resume, else the initial weights.

    A resumed run does not need the initial weights. They may have been moved or removed.
    """
    if resume is not None:
        return source_in(find_checkpoint(Path(resume), "--resume"))
    return find_source(init_from, "--init-from")


def with_tokenizer(options: Options) -> Options:
    """Use the tokenizer of the initial weights, unless the user chose another one.

    Raises:
        UserError: the tokenizer of the weights is unknown or unsupported, or differs from the tokenizer of a preset
            or prepared corpus (see `tokenizer_argument_for`).
    """
    config = options.config
    if config.init_from is None:
        return options
    tokenizer = tokenizer_argument_for(_weights_to_load(config.init_from, config.resume), config.tokenizer,
                                       config.corpus, asked=options.origin("tokenizer") not in NOT_FROM_USER)
    return options if tokenizer == config.tokenizer else options.set(WEIGHTS, tokenizer=tokenizer)


def with_vocabulary(config: TrainConfig, model: ModelConfig, vocab_size: int) -> ModelConfig:
    """Return the model for a tokenizer's vocabulary: small models are set to its size.

    Raises:
        UserError: the model has fewer tokens than the tokenizer.
    """
    if config.model in ADOPTS_VOCABULARY and config.init_from is None:
        return replace(model, vocab_size=vocab_size)
    if vocab_size > model.vocab_size:
        raise UserError(f"the tokenizer has {vocab_size} tokens, more than {config.model}'s {model.vocab_size}",
                        where="--tokenizer", instead="a tokenizer with a smaller vocabulary")
    return model
