"""List the layouts, or those that support a model on N ranks, with their memory per rank."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath

from ezpz_llm.core.base import UserError, count_noun, print_lines, run_command
from ezpz_llm.core.base.command_parser import CommandParser
from ezpz_llm.core.base.shell_commands import to_typable
from ezpz_llm.training.layout.listing import (
    as_json,
    check_world,
    layout_purposes,
    legal_grids,
    legal_text,
    named_layouts,
    purposes_text,
)
from ezpz_llm.training.layout.recommendation import (
    Cluster,
    choices,
    choices_text,
    first_fit,
    recommendation,
    settings_to_try,
)
from ezpz_llm.training.model.config import MODELS, ModelConfig, Recompute, get_model_config
from ezpz_llm.training.trainer.config import FIELDS, MODEL_OVERRIDES

_SHAPE = tuple(name for name in MODEL_OVERRIDES if name not in ("dropout", "bias"))
"""Options of the trainer that change the memory of a model."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = CommandParser("layouts", description=__doc__, shown=(
        "ezpz-llm layouts  all layouts and their purpose",
        "ezpz-llm layouts --world 64 --model llama3-8b --memory 80  recommend a layout for 80 GB devices",
        "ezpz-llm layouts --world 64 --model llama3-8b  supported layouts and their memory"))
    parser.add_argument("--world", type=int, metavar="N", help="list the layouts that N ranks support")
    parser.add_argument("--model", metavar="NAME", help=f"the model: {', '.join(MODELS)} (tiny-gpt2)")
    parser.add_argument("--init-from", metavar="PATH",
                        help="model of a config.json, or of its folder, a run directory, or a hub id")
    for name in _SHAPE:
        parser.add_argument(_option(name), type=int, metavar="N", help=FIELDS[name].metadata["help"])
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="show which TP groups would cross nodes")
    parser.add_argument("--memory", type=float, metavar="GB",
                        help="memory of a device: add activations, sort by what to try first, recommend a layout")
    parser.add_argument("--micro-batch-size", type=int, default=4, metavar="N",
                        help="largest number of sequences in a micro-batch, for activations (%(default)s)")
    parser.add_argument("--recompute", type=_recompute, default=0, metavar="selective|N",
                        help=FIELDS["recompute"].metadata["help"])
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    options = parser.parse_args(argv)
    check_world(options.world, options.ranks_per_node)
    model, name, typed = _choose_model(options)
    if options.memory is not None:
        return _recommend(options, model, name, typed)
    if options.world is None:
        print_lines(json.dumps(layout_purposes(), indent=2) if options.json else purposes_text(layout_purposes()))
        return 0
    legal = named_layouts(model, options.world), legal_grids(model, options.world)
    if options.json:
        print_lines(json.dumps(as_json(name, options.world, *legal, options.ranks_per_node), indent=2))
    else:
        color = sys.stdout.isatty()
        print_lines(legal_text(name, options.world, *legal, options.ranks_per_node, rich=color),
                    keeps_colors=color)
    return 0


def _choose_model(options: argparse.Namespace) -> tuple[ModelConfig, str, list[str]]:
    """Return the model that the trainer would run with these options, its name, and the options as typed."""
    changes = {name: value for name in _SHAPE if (value := getattr(options, name)) is not None}
    source = options.init_from
    if options.model and Path(options.model).exists():
        raise UserError(f"{options.model} is a path, and --model is a name", instead=f"--init-from {options.model}")
    if not source:
        name = options.model or "tiny-gpt2"
        model, words = get_model_config(name, **changes), {"model": name, **changes}
    elif options.model:
        raise UserError("--model and --init-from both set the model", instead="pass one of them")
    else:
        from ezpz_llm.training.hf.source import find_source, with_model_changes  # slow to import

        if PurePath(source).name == "config.json":
            source = str(PurePath(source).parent)
        name = PurePath(source).name or source
        model = with_model_changes(find_source(source, "--init-from").model, source, **changes)
        words = {"init_from": source, **changes}
    return model, name, [word for key, value in words.items() for word in (_option(key), str(value))]


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _recompute(text: str) -> Recompute:
    """Return the value of --recompute.

    Raises:
        argparse.ArgumentTypeError: the text is neither "selective" nor a number of at least 0.
    """
    if text == "selective":
        return "selective"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither selective nor a number of at least 0")
    return int(text)


def _recommend(options: argparse.Namespace, model: ModelConfig, name: str, typed: list[str]) -> int:
    if options.world is None or options.json:
        raise UserError("--memory requires --world and does not support --json", instead="--world 64 --memory 80")
    if not 0 < options.memory < 1e6 or options.micro_batch_size < 1:
        raise UserError(f"invalid memory of {options.memory:g} GB or micro-batch of {options.micro_batch_size}",
                        where="--memory, --micro-batch-size", instead="--memory 80 --micro-batch-size 4")
    cluster = Cluster(model, options.world, options.memory * 1e9)
    layouts = choices(model, options.world, options.ranks_per_node)
    settings = settings_to_try(options.micro_batch_size, options.recompute)
    best = first_fit(layouts, settings, cluster)
    setting = best[1] if best else settings[-1]
    title = (f"{name} on {count_noun(options.world, 'rank')}, GB per device with micro-batches of "
             f"{count_noun(setting.micro_batch, 'sequence')}"
             + (f" and --recompute {setting.recompute}" if setting.recompute else ""))
    color = sys.stdout.isatty()
    print_lines(choices_text(layouts, setting, cluster, title, rich=color), keeps_colors=color)
    print_lines(recommendation(best, cluster, to_typable(shlex.join(["launch", "python3", "-m", "ezpz_llm.train",
                                                                     *typed]))))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
