"""List the layouts, or what is legal for a model on so many ranks, with the memory it takes on each."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from ezpz_llm.base.errors import run_command
from ezpz_llm.layout.listing import (
    as_json,
    check_world,
    legal_grids,
    legal_text,
    named_layouts,
    purposes,
    purposes_text,
)
from ezpz_llm.model.config import MODELS, get_model_config


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="ezpz-llm layouts", description=__doc__, allow_abbrev=False)
    parser.add_argument("--world", type=int, metavar="N", help="list what is legal on so many ranks")
    parser.add_argument("--model", default="tiny-gpt2", metavar="NAME",
                        help=f"the model to divide: {', '.join(MODELS)} (%(default)s)")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="say which TP groups would cross nodes")
    parser.add_argument("--json", action="store_true", help="print it as JSON, in bytes")
    options = parser.parse_args(argv)
    check_world(options.world, options.ranks_per_node)
    model = get_model_config(options.model)
    if options.world is None:
        print(json.dumps(purposes(), indent=2) if options.json else purposes_text(purposes()))
        return 0
    found = named_layouts(model, options.world), legal_grids(model, options.world)
    if options.json:
        print(json.dumps(as_json(options.model, options.world, *found, options.ranks_per_node), indent=2))
    else:
        print(legal_text(options.model, options.world, *found, options.ranks_per_node, rich=sys.stdout.isatty()))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
