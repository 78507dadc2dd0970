"""Tasks of `evaluate`: validation loss, HellaSwag, and tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ezpz_llm.core.base import UserError, import_package, print_lines, require_package, user_path
from ezpz_llm.core.rundir.records import Data
from ezpz_llm.training.data.document_separator import SeparatorAdvice, document_separator
from ezpz_llm.training.data.formats import TEXT
from ezpz_llm.training.data.manifest import MANIFEST
from ezpz_llm.training.data.prepare import check_corpus
from ezpz_llm.training.evaluate.hellaswag import read_items
from ezpz_llm.training.evaluate.model import ModelPlan, add_common_arguments, remove_temporary_run
from ezpz_llm.training.hf.config import family_of
from ezpz_llm.training.hf.source import Source, find_source
from ezpz_llm.training.hf.tokenizer import (
    check_vocabulary,
    tokenizer_argument_for,
    tokenizer_mismatch,
    tokenizer_of,
    tokenizer_warning,
)

if TYPE_CHECKING:
    from ezpz_llm.training.dist import Dist


_SEPARATOR_ADVICE = SeparatorAdvice("use the tokenizer of the model",
                                    "pass another --corpus, since the model was trained with --mask-documents true")


@dataclass(frozen=True)
class Corpus:
    """Corpus to compute the validation loss on, with the run's mask. `tokens` is None for the whole split."""

    corpus: str
    tokenizer: str
    tokens: int | None
    text_key: str
    mask_documents: bool


def plan_validation(plan: ModelPlan, options: argparse.Namespace) -> Corpus:
    """Return the corpus and number of tokens from the options, or else from the run.

    Raises:
        UserError: the corpus is unknown or does not exist.
    """
    settings = plan.run_record.settings
    corpus = options.corpus or _corpus_of_run(plan)
    if corpus is None:
        raise UserError("the corpus that the model was trained on is unknown", where=str(plan.source.folder),
                        instead="--corpus NAME or PATH")
    tokens = settings.eval_tokens or 0 if options.tokens is None else options.tokens
    if tokens < 0:
        raise UserError(f"tokens is {tokens}", where="--tokens", instead="1 or more, or 0 for the whole split")
    tokenizer = tokenizer_argument_for(plan.source, options.tokenizer, corpus, asked=options.tokenizer is not None)
    text_key = settings.text_key or TEXT if corpus == settings.corpus else TEXT
    masks = bool(settings.mask_documents)
    check_corpus(corpus, tokenizer, plan.model.block_size, text_key, separates=_SEPARATOR_ADVICE if masks else None)
    return Corpus(corpus, tokenizer, tokens or None, text_key, masks)


def _corpus_of_run(plan: ModelPlan) -> str | None:
    """Return the run's corpus, or its shards if the corpus cannot be used, for example a relative path."""
    record = plan.run_record
    settings, shards, corpus = record.settings, (record.data or Data()).folder or "", record.settings.corpus
    try:
        if corpus is not None:
            check_corpus(corpus, settings.tokenizer, text_key=settings.text_key or TEXT)
    except UserError:
        return shards if Path(shards, MANIFEST).is_file() else corpus
    return corpus


def run_validation(plan: ModelPlan, planned: Corpus, dist: Dist, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the loss in nats per token, as in training. Collective."""
    from ezpz_llm.training.data.samples import ValidationWindows
    from ezpz_llm.training.evaluate.model import open_model
    from ezpz_llm.training.evaluate.validation import open_corpus, validation_loss
    from ezpz_llm.training.model.document_mask import mask_documents

    data = open_corpus(planned.corpus, planned.tokenizer, dist, planned.text_key)
    check_vocabulary(data.vocab_size, plan.model)
    _warn(dist, tokenizer_mismatch(plan.source, data.manifest.tokenizer))
    windows = ValidationWindows(data.split("val"), plan.model.block_size, planned.tokens)
    engine = open_model(plan, dist)
    mask_documents(engine.module, document_separator(data, _SEPARATOR_ADVICE) if planned.mask_documents else None)
    with engine.evaluating():
        loss, tokens = validation_loss(engine.loss_sum, windows.batches(options.batch, dist.mesh.dp_rank,
                                                                        dist.mesh.dp_size),
                                       device=engine.device, mesh=dist.mesh)
    if not math.isfinite(loss):
        raise UserError("the validation loss is NaN or Inf", where=plan.source.describe(),
                        instead="an earlier checkpoint, since the model diverged", exit_code=1)
    if loss > (guess := math.log(plan.model.vocab_size)):
        _warn(dist, f"the loss is above ln V = {guess:.4f}, the loss of a uniform guess among "
                    f"{plan.model.vocab_size} tokens. Check the tokenizer and the weights")
    return {"val_loss": loss, "val_tokens": tokens, "corpus": planned.corpus,
            "tokenizer": data.manifest.tokenizer.name}


def _warn(dist: Dist, text: str | None) -> None:
    if text is not None and dist.is_main:
        print_lines(f"warning: {text}", file=sys.stderr)


def plan_hellaswag(plan: ModelPlan, options: argparse.Namespace) -> Path:
    """Return the path of the file with the items, after checking its first item and the tokenizer.

    Raises:
        UserError: the file has no items, or an option is invalid.
    """
    if options.items is not None and options.items < 1:
        raise UserError(f"items is {options.items}", where="--items", instead="pass 1 or more, or omit --items")
    path = user_path(options.file)
    read_items(path, limit=1)
    tokenizer_of(plan.source, options.tokenizer)
    return path


def run_hellaswag(plan: ModelPlan, path: Path, dist: Dist, options: argparse.Namespace) -> dict[str, Any]:
    """Measure `acc` and `acc_norm`. Collective."""
    from ezpz_llm.training.evaluate.hellaswag import ENDINGS, score
    from ezpz_llm.training.evaluate.model import open_model

    tokenizer = tokenizer_of(plan.source, options.tokenizer)
    _warn(dist, tokenizer_warning(plan.source, options.tokenizer))
    items = read_items(path, options.items)
    engine = open_model(plan, dist)
    with engine.evaluating():
        result = score(engine.row_losses, items, tokenizer, block_size=plan.model.block_size, device=engine.device,
                       mesh=dist.mesh, items_at_once=max(1, options.batch // ENDINGS))
    return {**result.as_record(), "file": str(path), "tokenizer": tokenizer.name}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `evaluate harness`."""
    add_common_arguments(parser)
    parser.add_argument("--tasks", required=True, metavar="A,B", help="names of harness tasks")
    parser.add_argument("--include-path", type=Path, metavar="DIR", help="folder with your own task files")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N items of each task (default: all)")
    parser.add_argument("--few-shot", type=int, metavar="N", help="examples before each item (default: the task's)")
    parser.add_argument("--batch", type=int, default=8, metavar="N",
                        help="batch size in sequences (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"),
                        help="dtype of the weights (default: %(default)s)")


def main(options: argparse.Namespace, world_size: int) -> int:
    """Run `evaluate harness`; return its exit code.

    Raises:
        UserError: there is more than one rank, the model or a task does not exist, or the harness is not installed.
    """
    if world_size != 1:
        raise UserError(f"lm-evaluation-harness runs in one process, not on {world_size} ranks", where="launch",
                        instead="launch -n 1, or ezpz-llm evaluate harness …")
    source = find_source(options.source, "SOURCE")
    family_of(source.model)
    if not _task_names(options):
        raise UserError("--tasks is empty", where="--tasks", instead="names that `lm_eval ls tasks` lists")
    if options.check:
        require_package("lm_eval", "lm-evaluation-harness", "harness", "evaluate harness")
        return 0
    for part in ("models.huggingface", "tasks"):
        import_package(f"lm_eval.{part}", "lm-evaluation-harness", "harness", "evaluate harness")
    import lm_eval

    from ezpz_llm.core.rundir.records import update_record
    from ezpz_llm.training.dist.setup import setup

    dist = setup(device=options.device, run_dir=options.run_dir, name="evaluate-harness")
    try:
        with dist:
            folder, device = _model_folder(source, dist), str(dist.device)
        # After closing `dist`: with its rank variables in the environment, the harness would try to join the
        # process group.
        results = _run_harness(lm_eval, folder, device, options)
        update_record(dist.run_dir, source=source.describe(), evaluation={"harness": results})
    finally:
        remove_temporary_run(options, dist)
    print_lines(f"lm-evaluation-harness {lm_eval.__version__} on {source.describe()}")
    for task, metrics in results.items():
        texts = (f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}"
                 for name, value in metrics.items())
        print_lines(f"  {task}: {', '.join(texts)}")
    return 0


def _task_names(options: argparse.Namespace) -> list[str]:
    return [name for name in options.tasks.split(",") if name]


def _model_folder(source: Source, dist: Dist) -> Path:
    """Return a folder that transformers loads; export a checkpoint into the run directory."""
    if source.kind == "hf":
        return source.folder
    from ezpz_llm.training.hf.export import export
    from ezpz_llm.training.hf.weights import NO_TOKENIZER

    exported = export(source, dist.run_dir.path / "hf")
    if note := next((note for note in exported.notes if note.startswith(NO_TOKENIZER)), None):
        raise UserError(note, where=str(source.folder),
                        instead="a model whose tokenizer file is on this machine")
    return exported.folder


def _run_harness(lm_eval: ModuleType, folder: Path, device: str, options: argparse.Namespace) -> dict[str, Any]:
    manager = lm_eval.tasks.TaskManager(include_path=options.include_path and str(options.include_path))
    names = _task_names(options)
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise UserError(f"the harness has no task {', '.join(unknown)}", where="--tasks",
                        instead="a name that `lm_eval ls tasks` lists, or --include-path DIR with the task's file")
    report = lm_eval.simple_evaluate(
        model="hf", tasks=names, task_manager=manager, limit=options.limit, batch_size=options.batch,
        num_fewshot=options.few_shot, device=device, log_samples=False,
        model_args={"pretrained": str(folder), "dtype": options.dtype})
    return report["results"]
