"""Initial weights of a run, and the shape of its model: by name, or from given weights (imports no torch)."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import PurePath

from ezpz_llm.base.errors import UserError
from ezpz_llm.hf.source import Source, adapted, find_source
from ezpz_llm.hf.tokenizer import words_for
from ezpz_llm.model.config import ModelConfig, get_model_config
from ezpz_llm.trainer.config import MODEL_OVERRIDES, TrainConfig
from ezpz_llm.trainer.options import Options

_NOT_SHAPE = ("block_size", "vocab_size", "vocab_multiple", "dropout", "init", "norm_eps")
"""What a named model may have otherwise than the weights: these win."""
WEIGHTS = "weights to begin with"
"""The source of a setting that the weights bring."""


def choose_model(config: TrainConfig, named: bool) -> tuple[ModelConfig, str, Source | None]:
    """Return the model, its name, and its initial weights: None for those that the seed gives.

    Args:
        named: whether the model's name was chosen, and is not the default.

    Raises:
        UserError: an unknown name, a shape that does not work out, or one that is not the weights'.
    """
    overrides = {name: getattr(config, name) for name in MODEL_OVERRIDES}
    if config.init_from is None:
        return get_model_config(config.model, **overrides), config.model, None
    source = find_source(config.init_from, "--init-from")
    if named:
        for name, value in asdict(get_model_config(config.model, **overrides)).items():
            found = getattr(source.model, name)
            if name not in _NOT_SHAPE and value != found:
                raise UserError(f"{config.model} is not the model of these weights: {name} is {value}, theirs is "
                                f"{found}", where=str(source.folder),
                                instead="leave --model out: the weights bring their own")
    name = config.model if named else PurePath(config.init_from).name or str(source.folder)
    return adapted(source.model, str(source.folder), **overrides), name, source


def with_tokenizer(options: Options) -> Options:
    """The options, with the tokenizer that the weights to begin with bring.

    Raises:
        UserError: that is not known or not supported, or another is named and not asked for; see `words_for`.
    """
    config, source = options.config, options.sources["tokenizer"]
    if config.init_from is None:
        return options
    words = words_for(find_source(config.init_from, "--init-from"), config.tokenizer, config.corpus,
                      asked=not source.startswith(("default", "preset ", "recipe ")))
    if words == config.tokenizer:
        return options
    return replace(options, config=replace(config, tokenizer=words),
                   sources={**options.sources, "tokenizer": WEIGHTS})
