"""List the layouts, or those that support a model on N ranks, with their memory per rank."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from ezpz_llm.base import UserError, count_noun, print_lines, run_command
from ezpz_llm.base.command_parser import CommandParser
from ezpz_llm.base.shell_commands import to_typable
from ezpz_llm.layout.listing import (
    as_json,
    check_world,
    layout_purposes,
    legal_grids,
    legal_text,
    named_layouts,
    purposes_text,
)
from ezpz_llm.layout.recommendation import choices, choices_text, recommendation
from ezpz_llm.model.config import MODELS, ModelConfig, get_model_config


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = CommandParser("layouts", description=__doc__, shown=(
        "ezpz-llm layouts  all layouts and their purpose",
        "ezpz-llm layouts --world 64 --model llama3-8b --memory 80  recommend a layout for 80 GB devices",
        "ezpz-llm layouts --world 64 --model llama3-8b  supported layouts and their memory"))
    parser.add_argument("--world", type=int, metavar="N", help="list the layouts that N ranks support")
    parser.add_argument("--model", default="tiny-gpt2", metavar="NAME",
                        help=f"the model: {', '.join(MODELS)} (%(default)s)")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="show which TP groups would cross nodes")
    parser.add_argument("--memory", type=float, metavar="GB",
                        help="memory of a device: add activations, sort by what to try first, recommend a layout")
    parser.add_argument("--micro-batch-size", type=int, default=4, metavar="N",
                        help="sequences in a micro-batch, for activations (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    options = parser.parse_args(argv)
    check_world(options.world, options.ranks_per_node)
    model = get_model_config(options.model)
    if options.memory is not None:
        return _recommend(options, model)
    if options.world is None:
        print_lines(json.dumps(layout_purposes(), indent=2) if options.json else purposes_text(layout_purposes()))
        return 0
    legal = named_layouts(model, options.world), legal_grids(model, options.world)
    if options.json:
        print_lines(json.dumps(as_json(options.model, options.world, *legal, options.ranks_per_node), indent=2))
    else:
        color = sys.stdout.isatty()
        print_lines(legal_text(options.model, options.world, *legal, options.ranks_per_node, rich=color),
                    keeps_colors=color)
    return 0


def _recommend(options: argparse.Namespace, model: ModelConfig) -> int:
    if options.world is None or options.json:
        raise UserError("--memory requires --world and does not support --json", instead="--world 64 --memory 80")
    if not 0 < options.memory < 1e6 or options.micro_batch_size < 1:
        raise UserError(f"invalid memory of {options.memory:g} GB or micro-batch of {options.micro_batch_size}",
                        where="--memory, --micro-batch-size", instead="--memory 80 --micro-batch-size 4")
    memory = options.memory * 1e9
    layouts = choices(model, options.world, options.micro_batch_size, options.ranks_per_node, memory)
    title = (f"{options.model} on {count_noun(options.world, 'rank')}, GB per device with micro-batches of "
             f"{count_noun(options.micro_batch_size, 'sequence')}")
    color = sys.stdout.isatty()
    print_lines(choices_text(layouts, memory, title, rich=color), keeps_colors=color)
    command = to_typable(f"launch python3 -m ezpz_llm.train --model {options.model} "
                         f"--micro-batch-size {options.micro_batch_size}")
    print_lines(recommendation(layouts, memory, command))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
