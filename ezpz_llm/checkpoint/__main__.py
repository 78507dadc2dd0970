"""Look into checkpoints, verify them, export them for transformers, fetch published ones."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ezpz_llm.base.errors import UserError, run_command, show
from ezpz_llm.base.package_data import user_path
from ezpz_llm.checkpoint.describe import as_text, describe, folders_of, parameter_lines, verify_folder
from ezpz_llm.evaluate.model import SOURCE_HELP
from ezpz_llm.hf.source import fetch, find_source


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    options = _parser().parse_args(list(argv))
    return {"inspect": _inspect, "verify": _verify, "export": _export, "fetch": _fetch}[options.command](options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ezpz-llm checkpoint", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser("inspect", help="what it holds, without reading its tensors", allow_abbrev=False)
    add.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    add.add_argument("--parameters", action="store_true", help="list every parameter, its shape and its place")
    add.add_argument("--json", action="store_true", help="print it as JSON")
    add = commands.add_parser("verify", help="compare every file with its hash, and the index with the model",
                              allow_abbrev=False)
    add.add_argument("folder", metavar="FOLDER", help="a run directory (all its checkpoints), or a checkpoint")
    add = commands.add_parser("export", help="write a folder that transformers' AutoModelForCausalLM loads",
                              allow_abbrev=False)
    add.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    add.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    add.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"),
                     help="of the weights (%(default)s)")
    add.add_argument("--shard-gb", type=float, default=5.0, metavar="X",
                     help="the most that one file of weights gets, in 10^9 bytes (%(default)s)")
    add = commands.add_parser("fetch", help="download a GPT-2 or Llama of the hub, for use without a network",
                              allow_abbrev=False)
    add.add_argument("hub_id", metavar="HUB_ID", help="such as openai-community/gpt2")
    add.add_argument("--revision", metavar="R", help="a branch, tag or commit")
    return parser


def _inspect(options: argparse.Namespace) -> int:
    source = find_source(options.source, "SOURCE")
    facts = describe(source)
    show(json.dumps(facts, indent=2) if options.json else as_text(facts))
    if options.parameters and source.kind == "checkpoint":
        show("\n".join(["", *parameter_lines(source.folder)]))
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Go on after a damaged one, so that it is known which are whole; the code is 1 if any is damaged."""
    code = 0
    for folder in folders_of(user_path(options.folder)):
        try:
            size = verify_folder(folder)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            code = 1
        else:
            print(f"whole    {folder} ({size:,} bytes)", flush=True)
    return code


def _export(options: argparse.Namespace) -> int:
    source = find_source(options.source, "SOURCE")
    if not options.shard_gb > 0:
        raise UserError(f"a file of weights gets {options.shard_gb} GB", where="--shard-gb", instead="more than 0")
    from ezpz_llm.hf.export import export

    done = export(source, options.out.expanduser().absolute(), dtype=options.dtype,
                  shard_bytes=int(options.shard_gb * 1e9))
    print(f"{done.folder}: {done.bytes:,} bytes of weights in {done.files} file(s), from {source.describe()}",
          *(f"note: {note}" for note in done.notes), sep="\n")
    return 0


def _fetch(options: argparse.Namespace) -> int:
    print(fetch(options.hub_id, options.revision))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
