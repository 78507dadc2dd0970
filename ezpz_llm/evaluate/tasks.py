"""What `evaluate` measures: the loss on a corpus's validation split, HellaSwag, tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ezpz_llm.data.manifest import MANIFEST
from ezpz_llm.data.parquet import TEXT
from ezpz_llm.data.prepare import check_corpus
from ezpz_llm.errors import UserError
from ezpz_llm.evaluate.hellaswag import read_items
from ezpz_llm.evaluate.model import ModelPlan
from ezpz_llm.hf.reading import given_warning, other_tokenizer, tokenizer_of, words_for
from ezpz_llm.resources import user_path

if TYPE_CHECKING:
    from ezpz_llm.dist import Dist


@dataclass(frozen=True)
class Corpus:
    """What a validation loss is measured on. `tokens` is None for the whole split."""

    corpus: str
    tokenizer: str
    tokens: int | None
    text_key: str


def plan_validation(plan: ModelPlan, options: argparse.Namespace) -> Corpus:
    """The corpus that was named, or the run's own; as many tokens as the run took, unless that is said.

    Raises:
        UserError: neither is known, or the corpus is not there.
    """
    config = plan.run_record.get("config", {})
    corpus = options.corpus or _corpus_of_run(plan)
    if corpus is None:
        raise UserError("the model does not say which corpus it was trained on", where=str(plan.source.folder),
                        instead="--corpus NAME or PATH")
    tokens = config.get("eval_tokens", 0) if options.tokens is None else options.tokens
    if tokens < 0:
        raise UserError(f"tokens is {tokens}", where="--tokens", instead="1 or more; 0 for the whole split")
    words = words_for(plan.source, options.tokenizer, corpus, asked=options.tokenizer is not None)
    text_key = config.get("text_key", TEXT) if corpus == config.get("corpus") else TEXT
    check_corpus(corpus, words, plan.model.block_size, text_key)
    return Corpus(corpus, words, tokens or None, text_key)


def _corpus_of_run(plan: ModelPlan) -> str | None:
    """What the run was told, or its shards where that was a path from another folder than this."""
    config, shards = plan.run_record.get("config", {}), plan.run_record.get("data", {}).get("folder", "")
    corpus = config.get("corpus")
    try:
        if corpus is not None:
            check_corpus(corpus, config.get("tokenizer"), text_key=config.get("text_key", TEXT))
    except UserError:
        return shards if Path(shards, MANIFEST).is_file() else corpus
    return corpus


def run_validation(plan: ModelPlan, planned: Corpus, dist: Dist, options: argparse.Namespace) -> dict[str, Any]:
    """The loss in nats a token, as in training. Collective."""
    from ezpz_llm.data.samples import validation_windows
    from ezpz_llm.evaluate.corpus import open_corpus
    from ezpz_llm.evaluate.model import open_model
    from ezpz_llm.evaluate.validation import validation_loss

    data = open_corpus(planned.corpus, planned.tokenizer, dist, planned.text_key)
    _check_vocabulary(plan, data)
    _warn(dist, other_tokenizer(plan.source, data.manifest["tokenizer"]))
    windows = validation_windows(data.split("val"), plan.model.block_size, planned.tokens)
    engine = open_model(plan, dist)
    with engine.evaluating():
        loss, tokens = validation_loss(engine.loss_sum, windows.batches(options.batch, dist.mesh.dp_rank,
                                                                        dist.mesh.dp_size),
                                       device=engine.device, mesh=dist.mesh)
    if loss > (guess := math.log(plan.model.vocab_size)):
        _warn(dist, f"the loss is above ln V = {guess:.4f}, that of a guess among {plan.model.vocab_size} tokens: "
                    "look at the tokenizer, and whether the weights are the right ones")
    return {"val_loss": loss, "val_tokens": tokens, "corpus": planned.corpus,
            "tokenizer": data.manifest["tokenizer"]["name"]}


def _warn(dist: Dist, remark: str | None) -> None:
    if remark is not None and dist.is_main:
        print(f"warning: {remark}", file=sys.stderr, flush=True)


def _check_vocabulary(plan: ModelPlan, data: Any) -> None:
    if data.vocab_size > plan.model.padded_vocab_size:
        raise UserError(f"the tokenizer has {data.vocab_size} tokens, the model {plan.model.vocab_size}",
                        where="--tokenizer", instead="the tokenizer that the model's data were made with")


def plan_hellaswag(plan: ModelPlan, options: argparse.Namespace) -> Path:
    """The file with the items, known to have some.

    Raises:
        UserError: it has not.
    """
    if options.items is not None and options.items < 1:
        raise UserError(f"items is {options.items}", where="--items", instead="1 or more; leave it out for all")
    path = user_path(options.file)
    read_items(path, limit=1)
    tokenizer_of(plan.source, options.tokenizer)
    return path


def run_hellaswag(plan: ModelPlan, path: Path, dist: Dist, options: argparse.Namespace) -> dict[str, Any]:
    """Both accuracies. Collective."""
    from ezpz_llm.evaluate.hellaswag import ENDINGS, score
    from ezpz_llm.evaluate.model import open_model

    tokenizer = tokenizer_of(plan.source, options.tokenizer)
    _warn(dist, given_warning(plan.source, options.tokenizer))
    items = read_items(path, options.items)
    engine = open_model(plan, dist)
    with engine.evaluating():
        found = score(engine.row_losses, items, tokenizer, block_size=plan.model.block_size, device=engine.device,
                      mesh=dist.mesh, items_at_once=max(1, options.batch // ENDINGS))
    return {**found.as_record(), "file": str(path), "tokenizer": tokenizer.name}
