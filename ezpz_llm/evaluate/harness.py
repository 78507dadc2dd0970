"""Tasks of lm-evaluation-harness, on the model as transformers loads it.

Its HellaSwag is not ours: it prefixes the activity, edits the text, and normalises by characters.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ezpz_llm.dist.backends import DEVICES
from ezpz_llm.errors import UserError
from ezpz_llm.evaluate.model import SOURCE_HELP
from ezpz_llm.hf.names import family_of
from ezpz_llm.hf.source import Source, find_source

if TYPE_CHECKING:
    from ezpz_llm.dist import Dist


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `evaluate harness`."""
    parser.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    parser.add_argument("--tasks", required=True, metavar="A,B", help="tasks by the harness's names")
    parser.add_argument("--include-path", type=Path, metavar="DIR", help="a folder with task files of your own")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N items of each task (all)")
    parser.add_argument("--few-shot", type=int, metavar="N", help="examples before each item (the task's own)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="sequences at once (%(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"),
                        help="of the weights (%(default)s)")
    parser.add_argument("--device", default="auto", choices=("auto", *DEVICES), help="(%(default)s)")
    parser.add_argument("--run-dir", type=Path, metavar="D",
                        help="where to write (launch's, or a new one in runs/)")
    parser.add_argument("--check", action="store_true", help="only find what is wrong with the options (no torch)")
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="the number of ranks, for --check")


def main(options: argparse.Namespace, world_size: int) -> int:
    """`evaluate harness`; returns its exit code.

    Raises:
        UserError: more than one rank, no such model or task, or the harness is not installed.
    """
    if world_size != 1:
        raise UserError(f"lm-evaluation-harness runs in one process, not on {world_size} ranks", where="launch",
                        instead="launch -n 1, or ezpz-llm evaluate harness …")
    source = find_source(options.source, "SOURCE")
    family_of(source.model)
    if not _names(options):
        raise UserError("no task is named", where="--tasks", instead="names that `lm_eval ls tasks` lists")
    if options.check:
        if find_spec("lm_eval") is None:
            raise _absent("there is no module lm_eval")
        return 0
    lm_eval = _library()
    from ezpz_llm.dist.setup import setup
    from ezpz_llm.rundir import update_record

    with setup(device=options.device, run_dir=options.run_dir, name="evaluate-harness") as dist:
        folder, device = _folder(source, dist), str(dist.device)
    # Outside, where the environment names no ranks: the harness would try to join them.
    results = _evaluate(lm_eval, folder, device, options)
    update_record(dist.run_dir, source=source.describe(), evaluation={"harness": results})
    print(f"lm-evaluation-harness {lm_eval.__version__} on {source.describe()}")
    for task, metrics in results.items():
        print(f"  {task}: " + ", ".join(f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}"
                                       for name, value in metrics.items()), flush=True)
    return 0


def _library() -> ModuleType:
    try:
        import lm_eval
        import lm_eval.models.huggingface
        import lm_eval.tasks
    except ImportError as error:
        raise _absent(str(error)) from error
    return lm_eval


def _absent(why: str) -> UserError:
    return UserError(f"lm-evaluation-harness is not installed, or not whole ({why})", where="evaluate harness",
                     instead="pip install 'ezpz_llm[harness]'")


def _names(options: argparse.Namespace) -> list[str]:
    return [name for name in options.tasks.split(",") if name]


def _folder(source: Source, dist: Dist) -> Path:
    """The model as a folder for transformers: exported into the run directory where it is not one already."""
    if source.kind == "hf":
        return source.folder
    from ezpz_llm.hf.export import export

    exported = export(source, dist.run_dir.path / "hf")
    if exported.notes:
        raise UserError(exported.notes[0], where=str(source.folder),
                        instead="a model whose tokenizer is bytes, char or gpt2, the latter's file in the cache")
    return exported.folder


def _evaluate(lm_eval: ModuleType, folder: Path, device: str, options: argparse.Namespace) -> dict[str, Any]:
    manager = lm_eval.tasks.TaskManager(include_path=options.include_path and str(options.include_path))
    names = _names(options)
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise UserError(f"the harness has no task {', '.join(unknown)}", where="--tasks",
                        instead="a name that `lm_eval ls tasks` lists, or --include-path DIR with its file")
    found = lm_eval.simple_evaluate(
        model="hf", tasks=names, task_manager=manager, limit=options.limit, batch_size=options.batch,
        num_fewshot=options.few_shot, device=device, log_samples=False,
        model_args={"pretrained": str(folder), "dtype": options.dtype})
    return found["results"]
