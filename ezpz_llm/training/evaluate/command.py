"""Evaluate a trained model: its validation loss, HellaSwag, or tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

from ezpz_llm.core.base import print_lines
from ezpz_llm.core.base.command_parser import CommandParser
from ezpz_llm.launcher.basics.ranks import find_rank
from ezpz_llm.training.evaluate import tasks
from ezpz_llm.training.evaluate.model import add_arguments, as_rank, plan_model
from ezpz_llm.training.hf.weight_files import check_weight_files

_TASKS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "val": (tasks.plan_validation, tasks.run_validation),
    "hellaswag": (tasks.plan_hellaswag, tasks.run_hellaswag)}


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code. Imports torch only when computation starts."""
    options = _parser().parse_args(list(argv))
    world_size = options.world_size if options.check else find_rank(os.environ).world_size
    if options.task == "harness":
        return tasks.main(options, world_size)
    plan_task, run_task = _TASKS[options.task]
    plan = plan_model(options, world_size)
    task_plan = plan_task(plan, options)
    if options.check:
        check_weight_files(plan.source)
        print_lines(plan.resolved.explain())
        return 0
    from ezpz_llm.core.rundir.records import update_record

    with as_rank(options, f"evaluate-{options.task}") as dist:
        result = run_task(plan, task_plan, dist, options)
        if dist.is_main:
            update_record(dist.run_dir, source=plan.source.describe(), evaluation={options.task: result})
            lines = (f"  {name:<12}{value:.4f}" if isinstance(value, float) else f"  {name:<12}{value}"
                     for name, value in result.items())
            print_lines("\n".join([f"{options.task} of {plan.source.describe()}", *lines]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("evaluate", description=__doc__, shown=(
        "ezpz-llm evaluate val runs/gpt2",
        "ezpz-llm evaluate hellaswag runs/gpt2 --file hellaswag_val.jsonl"))
    commands = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    add = commands.add_parser("val", help="loss on the first tokens of a corpus's validation split")
    add_arguments(add, batch=8)
    add.add_argument("--corpus", metavar="NAME|PATH", help="corpus (default: the run's)")
    add.add_argument("--tokens", type=int, metavar="N",
                     help="validation tokens from the start of the split; 0: all (default: as in the run)")
    add = commands.add_parser("hellaswag", help="accuracy in choosing one of four endings, from a local file")
    add_arguments(add, batch=16)
    add.add_argument("--file", required=True, metavar="F", help="hellaswag_val.jsonl, plain or gzipped")
    add.add_argument("--items", type=int, metavar="N", help="score only the first N items (default: all)")
    add = commands.add_parser("harness", help="tasks of lm-evaluation-harness, on the exported model")
    tasks.add_arguments(add)
    return parser
