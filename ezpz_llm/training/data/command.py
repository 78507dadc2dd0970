"""Convert text to token shards, inspect and verify shards, list a step's documents, and install a tokenizer."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ezpz_llm.core.base import UserError, count_noun, print_lines
from ezpz_llm.core.base.command_parser import CommandParser


def main(argv: Sequence[str]) -> int:
    """Run the command line `argv` and return the exit code."""
    # Subcommands import their modules when they run, so that `--help` stays fast.
    args = _parser().parse_args(list(argv))
    return args.run(args)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("data", description=__doc__, shown=(
        "ezpz-llm data prepare my_text/ --tokenizer gpt2  once, before the job",
        "ezpz-llm data which runs/gpt2 --step 412  list the documents that a step of a run read",
        "ezpz-llm data tokenizer gpt2 --download  on a machine with network access"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    _add_prepare(commands.add_parser("prepare", help="convert text to token shards and print their folder"))
    for name, run, text in (("verify", _verify, "check the sha256 of every shard in a folder"),
                            ("show", _show, "print a summary of a folder of shards")):
        add = commands.add_parser(name, help=text)
        add.add_argument("folder", type=Path, metavar="DIR")
        add.set_defaults(run=run)

    add = commands.add_parser("which", help="list the documents that a step of a run read")
    add.add_argument("folder", type=Path, metavar="RUN", help="run directory")
    add.add_argument("--step", type=int, required=True, metavar="N", help="step number, from 1")
    add.add_argument("--json", action="store_true", help="print JSON")
    add.set_defaults(run=_which)

    add = commands.add_parser("tokenizer", help="install the file that the gpt2 tokenizer needs")
    add.add_argument("name", choices=["gpt2"])
    source = add.add_mutually_exclusive_group(required=True)
    source.add_argument("--from-folder", type=Path, metavar="DIR",
                        help="copy vocab.bpe from this folder, which may be a tiktoken cache folder")
    source.add_argument("--download", action="store_true", help="download vocab.bpe")
    add.set_defaults(run=_tokenizer)
    return parser


def _add_prepare(add: argparse.ArgumentParser) -> None:
    """Add the options of `prepare`."""
    add.add_argument("corpus", metavar="CORPUS",
                     help="stdlib, shakespeare, fineweb-edu, hf:NAME[:CONFIG][@REVISION] (a Hugging Face data set) "
                          "or a path: a text, JSON lines or parquet file (plain, gzip or zstd), a folder of such "
                          "files, a folder of build-nanogpt, nanoGPT or llm.c shards, or X for Megatron's X.bin "
                          "and X.idx. To mix several, pass weights: A=0.7,B=0.3")
    add.add_argument("--tokenizer", metavar="T",
                     help="bytes, char, gpt2, a tokenizer.json, a SentencePiece *.model, or a folder with a "
                          "tokenizer: a model, token shards or a checkpoint (default: char for shakespeare, gpt2 "
                          "for data sets, else bytes)")
    add.add_argument("--out", type=Path, metavar="DIR", help="output folder (default: a folder in the cache)")
    source = add.add_mutually_exclusive_group()
    source.add_argument("--file", type=Path, metavar="F", help="local copy of the text (shakespeare only)")
    source.add_argument("--download", action="store_true",
                        help="download the corpus (shakespeare and data sets on the hub)")
    val = add.add_mutually_exclusive_group()
    val.add_argument("--val-fraction", type=float, metavar="X",
                     help="validate on this fraction of the tokens, from the end of the corpus (default: 0.1 for "
                          "one file, 0.02 for several)")
    val.add_argument("--val-tokens", type=int, metavar="N",
                     help="validate on the first N tokens (default for data sets: 100 million)")
    add.add_argument("--workers", type=int, metavar="N",
                     help="number of processes (default: one per 16 MB, at most one per core)")
    add.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N",
                     help="tokens per shard file (default: %(default)s)")
    add.add_argument("--text-key", default="text", metavar="K",
                     help="key of the text in JSON objects, or its column in parquet files and data sets "
                          "(default: %(default)s)")
    add.add_argument("--max-broken", type=int, default=0, metavar="N",
                     help="skip up to N unreadable documents and report them (default: fail on the first)")
    add.add_argument("--special-tokens", choices=("true", "false"), default="false",
                     help="encode special tokens in the text, such as <|im_start|>, as tokens (default: as "
                          "ordinary text)")
    add.add_argument("--check", action="store_true", help="only check that the corpus and the tokenizer exist")
    # launch passes --world-size with --check to every command; shards do not depend on it.
    add.add_argument("--world-size", type=int, help=argparse.SUPPRESS)
    add.set_defaults(run=_prepare)


def _prepare(args: argparse.Namespace) -> int:
    from ezpz_llm.training.data.corpora import SHAKESPEARE
    from ezpz_llm.training.data.prepare import check_corpus, prepare

    if args.corpus == "shakespeare" and args.file:
        SHAKESPEARE.copy_from(args.file.expanduser())
    elif args.corpus == "shakespeare" and args.download:
        SHAKESPEARE.download()
    elif args.file:
        raise UserError(f"--file works only with shakespeare, not with {args.corpus}", where="command line",
                        instead="to prepare another text, pass its path: python3 -m ezpz_llm.data prepare PATH")
    if args.check:
        check_corpus(args.corpus, args.tokenizer, text_key=args.text_key, max_broken=args.max_broken)
        return 0
    print_lines(prepare(args.corpus, args.tokenizer, out=args.out, val_fraction=args.val_fraction,
                  val_tokens=args.val_tokens, workers=args.workers, shard_tokens=args.shard_tokens,
                  download=args.download, text_key=args.text_key, max_broken=args.max_broken,
                  special_tokens=args.special_tokens == "true"))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from ezpz_llm.training.data.manifest import verify

    print_lines(f"verified {count_noun(verify(args.folder), 'shard')} against the manifest: {args.folder}")
    return 0


def _show(args: argparse.Namespace) -> int:
    from ezpz_llm.training.data.samples import as_mixture
    from ezpz_llm.training.data.shards import TokenData
    from ezpz_llm.training.data.tokenize_corpus import reading_notes

    data = TokenData.open(args.folder)
    manifest = data.manifest
    source, tokenizer = manifest.source, manifest.tokenizer
    python = f", {source.python}" if source.python else ""
    files = "file" if source.files == 1 else "files"
    counts = as_mixture(data.split("train")).counts if data.parts else ()
    lines = [
        ("corpus", f"{source.corpus} ({source.files:,} {files}, {source.bytes:,} bytes{python})"),
        ("tokenizer", f"{tokenizer.name}, vocabulary {manifest.vocab_size:,}, "
                      f"fingerprint {tokenizer.fingerprint[:12]}"),
        ("documents", f"{manifest.documents:,}"),
        *((name, f"{split.tokens:,} tokens" + (
            "" if data.parts else f" in {count_noun(len(split.shards), 'shard')} of {manifest.dtype}"))
          for name, split in (("train", manifest.splits.train), ("val", manifest.splits.val))),
        *(("part", f"{weight:g} ({count} of {sum(counts)} samples): {part.folder}")
          for (part, weight), count in zip(data.parts, counts, strict=True)),
        ("entropy", f"{data.unigram_entropy:.4f} nats per token (unigram); "
                    f"ln of the vocabulary size is {math.log(manifest.vocab_size):.4f}"),
        *(("note", remark) for remark in reading_notes(source)),
        ("command", manifest.command),
    ]
    print_lines("\n".join(f"{name:12} {text}" for name, text in lines))
    return 0


def _which(args: argparse.Namespace) -> int:
    from ezpz_llm.training.data.document_lookup import describe_read, step_read

    step_documents = step_read(args.folder, args.step)
    if args.json:
        print_lines(json.dumps(asdict(step_documents)))
    else:
        print_lines(describe_read(step_documents))
    return 0


def _tokenizer(args: argparse.Namespace) -> int:
    from ezpz_llm.training.data.tokenizers import GPT2_VOCAB, install_gpt2

    print_lines(install_gpt2(args.from_folder.expanduser()) if args.from_folder else GPT2_VOCAB.download())
    return 0
