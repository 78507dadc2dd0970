"""Inspect and verify checkpoints, export them to transformers or torch, download published ones."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import UserError, count_noun, print_lines, run_command, user_path
from ezpz_llm.core.base.command_parser import CommandParser
from ezpz_llm.core.base.records import as_plain
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.training.checkpoint.index import BUFFER, Index, Parameter, check_model, read_index
from ezpz_llm.training.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    complete_checkpoints,
    latest_checkpoint,
    read_manifest,
    shard_name,
    verify,
)
from ezpz_llm.training.checkpoint.script_model import prefix_of
from ezpz_llm.training.checkpoint.state import State, read_state
from ezpz_llm.training.evaluate.model import SOURCE_HELP
from ezpz_llm.training.hf.source import Source, fetch, find_folder, script_state, source_in
from ezpz_llm.training.model.parameters import parameter_count, parameter_shapes


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    options = _parser().parse_args(list(argv))
    if options.command == "fetch":
        print_lines(fetch(options.hub_id, options.revision))
        return 0
    return {"inspect": _inspect, "verify": _verify, "export": _export}[options.command](options)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("checkpoint", description=__doc__, shown=(
        "ezpz-llm checkpoint inspect runs/gpt2",
        "ezpz-llm checkpoint export runs/gpt2 exported/  a folder that transformers loads",
        "ezpz-llm checkpoint fetch openai-community/gpt2"))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser("inspect", help="print the contents of a checkpoint, without reading tensors")
    add.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    add.add_argument("--parameters", action="store_true", help="list every parameter, its shape and its files")
    add.add_argument("--json", action="store_true", help="print JSON")
    add = commands.add_parser("verify", help="compare every file with its hash, and the index with the model")
    add.add_argument("folder", metavar="FOLDER", help="a run directory (all its checkpoints), or a checkpoint")
    add = commands.add_parser("export", help="write a folder that transformers loads; for a script's own module, a "
                                             "model.safetensors that torch loads")
    add.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    add.add_argument("out", type=Path, metavar="OUT", help="folder to create")
    add.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"),
                     help="dtype of the weights (default: %(default)s)")
    add.add_argument("--shard-gb", type=float, default=5.0, metavar="X",
                     help="maximum size of a weights file for transformers, in 10^9 bytes (default: %(default)s)")
    add = commands.add_parser("fetch", help="download a GPT-2 or Llama from the Hugging Face hub, for offline use")
    add.add_argument("hub_id", metavar="HUB_ID", help="such as openai-community/gpt2")
    add.add_argument("--revision", metavar="R", help="a branch, tag or commit")
    return parser


def _inspect(options: argparse.Namespace) -> int:
    folder = find_folder(options.source, "SOURCE")
    state = script_state(folder)
    facts = _facts(source_in(folder)) if state is None else _script_facts(folder, state)
    print_lines(json.dumps(facts, indent=2) if options.json else _as_text(facts))
    if options.parameters and facts["kind"] != "hf":
        parameters = read_index(folder).parameters
        print_lines("\n".join(["", *(_parameter_row(*item) for item in parameters.items())]))
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Verify all checkpoints, even after a damaged one; return 1 if any is damaged."""
    code = 0
    for folder in _find_checkpoints(user_path(options.folder)):
        try:
            size = _verify_folder(folder)
        except UserError as error:
            print_lines(f"error: {error}", file=sys.stderr)
            code = 1
        else:
            print_lines(f"intact   {folder} ({size:,} bytes)")
    return code


def _export(options: argparse.Namespace) -> int:
    folder = find_folder(options.source, "SOURCE")
    if not options.shard_gb > 0:
        raise UserError(f"--shard-gb is {options.shard_gb:g}", where="--shard-gb", instead="more than 0")
    from ezpz_llm.training.hf.export import export
    from ezpz_llm.training.hf.script_export import export_script

    state, out, shard_bytes = script_state(folder), options.out.expanduser().absolute(), options.shard_gb * 1e9
    if state is not None:
        exported = export_script(folder, state, out, dtype=options.dtype, shard_bytes=shard_bytes)
        origin = f"{folder} (step {state.step})"
    else:
        source = source_in(folder)
        exported = export(source, out, dtype=options.dtype, shard_bytes=shard_bytes)
        origin = source.describe()
    print_lines("\n".join([f"{exported.folder}: {exported.bytes:,} bytes of weights in "
                           f"{count_noun(exported.files, 'file')}, from {origin}",
                           *(f"note: {note}" for note in exported.notes)]))
    return 0


def _facts(source: Source) -> dict[str, Any]:
    """Return the contents of a checkpoint or Hugging Face folder, as printed by --json."""
    facts: dict[str, Any] = {"folder": str(source.folder), "kind": source.kind, "model": asdict(source.model),
                             "parameters": parameter_count(source.model)}
    if source.state is None:
        from ezpz_llm.training.hf.weights import open_weights

        with open_weights(source) as weights:
            return {**facts, "notes": weights.notes}
    return {**facts, "tokenizer": source.tokenizer and source.tokenizer.name,
            **_checkpoint_facts(source.folder, source.state, read_index(source.folder))}


def _script_facts(folder: Path, state: State) -> dict[str, Any]:
    """Return the contents of a script's checkpoint, as printed by --json."""
    index = read_index(folder)
    from ezpz_llm.training.hf.weight_files import TensorFiles  # needs the extra `train`

    with TensorFiles(folder, "numpy") as files:
        stored = list(files.open(shard_name(0)).keys())
    models = {}
    for name, model in state.script_models.items():
        prefix = prefix_of(name)
        shapes = [parameter.shape for key, parameter in index.parameters.items() if key.startswith(prefix)]
        models[name] = {"class": model.class_name, "is_hugging_face": model.config is not None,
                        "tensors": len(shapes), "parameters": sum(map(math.prod, shapes)),
                        "buffers": [key.removeprefix(BUFFER + prefix) for key in stored
                                    if key.startswith(BUFFER + prefix)]}
    return {"folder": str(folder), "kind": "script", "models": models,
            "parameters": sum(math.prod(parameter.shape) for parameter in index.parameters.values()),
            **_checkpoint_facts(folder, state, index)}


def _checkpoint_facts(folder: Path, state: State, index: Index) -> dict[str, Any]:
    files = read_manifest(folder)
    shown = {name: value for name, value in as_plain(state).items() if name not in _NOT_SHOWN}
    return {"state": shown, "tensors": list(index.kinds),
            "pieces": sum(len(parameter.pieces) for parameter in index.parameters.values()),
            "files": {file.name: file.size for file in files}, "bytes": sum(file.size for file in files)}


_NOT_SHOWN = ("model", "models", "hf_config", "numbers", "tokenizer")
"""Members of state.json that are shown in another form, or are long."""


def _parameter_row(name: str, parameter: Parameter) -> str:
    """Format a parameter's name, shape, size, number of pieces, and files."""
    files = sorted({piece.file for piece in parameter.pieces})
    place = f" in {files[0]}" if files else ""  # a parameter without elements has no pieces
    return (f"{name:<40} {'x'.join(map(str, parameter.shape)):>14} {math.prod(parameter.shape):>14,}  "
            f"{count_noun(len(parameter.pieces), 'piece')}{place}{f' … {files[-1]}' if len(files) > 1 else ''}")


def _as_text(facts: dict[str, Any]) -> str:
    """Format the contents as text."""
    rows = [("folder", facts["folder"])]
    rows += _script_rows(facts["models"]) if facts["kind"] == "script" else _model_rows(facts["model"])
    rows.append(("parameters", f"{facts['parameters']:,}"))
    if facts["kind"] != "hf":
        rows += [(name, _format_value(value)) for name, value in facts["state"].items()]
        rows += [("tokenizer", facts["tokenizer"] or "unknown")] if facts["kind"] == "checkpoint" else []
        rows += [("tensors", f"{', '.join(facts['tensors'])} in {count_noun(facts['pieces'], 'piece')}"),
                 ("files", f"{len(facts['files'])}, {facts['bytes']:,} bytes")]
    rows += [("note", note) for note in facts.get("notes", ())]
    return "\n".join(f"{name:<15} {value}" for name, value in rows)


def _model_rows(model: dict[str, Any]) -> list[tuple[str, str]]:
    return [("model", f"{count_noun(model['n_layer'], 'layer')}, {count_noun(model['n_head'], 'head')} "
                      f"({model['n_kv_head']} key/value), "
                      f"width {model['n_embd']}, context {model['block_size']}, vocabulary {model['vocab_size']} "
                      f"in {-(-model['vocab_size'] // model['vocab_multiple']) * model['vocab_multiple']} rows"),
            ("kind", f"{model['norm']}, {model['position']} positions, {model['mlp']}, "
                     f"biases {'yes' if model['bias'] else 'no'}, tied head {'yes' if model['tied'] else 'no'}")]


def _script_rows(models: dict[str, Any]) -> list[tuple[str, str]]:
    return [(f"model {name}".rstrip(), f"{model['class']}{' of transformers' * model['is_hugging_face']}, "
                                       f"{count_noun(model['tensors'], 'parameter tensor')}, "
                                       f"{count_noun(len(model['buffers']), 'buffer')}")
            for name, model in models.items()]


_MAX_LISTED = 5


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_format_value(inner)}" for key, inner in value.items())
    if isinstance(value, list):  # the spike detector's window has a hundred values
        return "; ".join(map(_format_value, value)) if len(value) <= _MAX_LISTED else f"({len(value)} values)"
    return "-" if value is None else str(value)


def _find_checkpoints(path: Path) -> list[Path]:
    """Return `path` if it is a checkpoint, or all complete checkpoints of a run directory, oldest first.

    Raises:
        UserError: there is no complete checkpoint, or `latest` names a missing one.
    """
    if (path / MANIFEST).is_file():
        return [path]
    checkpoints = path if path.name == "checkpoints" else RunDir(path).checkpoints
    folders = complete_checkpoints(checkpoints)
    if not folders:
        raise UserError(f"no complete checkpoint in {path}", where="FOLDER",
                        instead="a run directory, or a checkpoints/step-… folder in one")
    newest = latest_checkpoint(checkpoints)
    if newest is not None and newest not in folders:
        raise UserError(f"{LATEST} names {newest.name}, which does not exist", where=str(checkpoints), exit_code=1)
    return folders


def _verify_folder(folder: Path) -> int:
    """Check the hashes of all files, and that the index lists each element of each parameter exactly once.

    Returns:
        The number of bytes read.

    Raises:
        UserError: the checkpoint is damaged.
    """
    records = read_manifest(folder)
    verify(folder, records)
    index, state = read_index(folder), read_state(folder)
    shapes = ({name: parameter.shape for name, parameter in index.parameters.items()} if state.is_of_script else
              parameter_shapes(state.config(folder)))
    check_model(index, shapes, folder)
    return sum(record.size for record in records)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
