"""Generate text from a run, a checkpoint or a Hugging Face folder, under any layout."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ezpz_llm.core.base import UserError, print_lines
from ezpz_llm.core.base.command_parser import CommandParser
from ezpz_llm.launcher.basics.ranks import find_rank
from ezpz_llm.training.data.prompts import encode_prompt
from ezpz_llm.training.dist.seeds import seed_for
from ezpz_llm.training.evaluate.model import ModelPlan, add_arguments, as_rank, open_model, plan_model
from ezpz_llm.training.hf.tokenizer import encodes_special_tokens, tokenizer_of, tokenizer_warning
from ezpz_llm.training.hf.weight_files import check_weight_files

if TYPE_CHECKING:
    from ezpz_llm.training.data.tokenizers import Tokenizer
    from ezpz_llm.training.dist import Dist


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code. torch is imported only after the options are checked."""
    options = _parser().parse_args(list(argv))
    _check_numbers(options)
    plan = plan_model(options, options.world_size if options.check else find_rank(os.environ).world_size)
    tokenizer = tokenizer_of(plan.source, options.tokenizer)
    prompt = encode_prompt(tokenizer, options.prompt, encodes_special_tokens(plan.source))
    if not len(prompt):
        raise UserError("the prompt has no tokens", where="--prompt", instead='--prompt "Once upon a time"')
    if options.check:
        check_weight_files(plan.source)
        print_lines(plan.resolved.explain())
        return 0
    with as_rank(options, "generate") as dist:
        texts = generate(plan, dist, tokenizer, prompt, options)
        if dist.is_main:
            _report(plan, dist, texts, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("generate", description=__doc__, shown=(
        'ezpz-llm generate runs/gpt2 --prompt "import "',
        "launch -n 2 python3 -m ezpz_llm.generate runs/gpt2 --ds-config tp2  on two ranks"))
    add_arguments(parser, batch=4)
    parser.add_argument("--prompt", default="Hello, I'm a language model,", metavar="TEXT",
                        help="the beginning of the text (%(default)s)")
    parser.add_argument("--tokens", type=int, default=100, metavar="N",
                        help="tokens to generate; each text is cut at its first end-of-text token (%(default)s)")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="texts to generate (%(default)s)")
    parser.add_argument("--top-k", type=int, default=50, metavar="K",
                        help="sample from the K likeliest tokens; 0 for all (%(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X",
                        help="divide the logits by X; lower values are less random (%(default)s)")
    parser.add_argument("--seed", type=int, default=42, metavar="N", help="sampling seed (%(default)s)")
    return parser


def _check_numbers(options: argparse.Namespace) -> None:
    for name, least in (("tokens", 1), ("samples", 1), ("top_k", 0)):
        if getattr(options, name) < least:
            raise UserError(f"{name.replace('_', ' ')} is {getattr(options, name)}",
                            where=f"--{name.replace('_', '-')}", instead=f"{least} or more")
    if not 0 < options.temperature < float("inf"):
        raise UserError(f"the temperature is {options.temperature}", where="--temperature",
                        instead="a finite value above 0; --top-k 1 always picks the likeliest token")
    seed_for(options.seed, "sample")  # raises UserError if the seed is out of range


def generate(plan: ModelPlan, dist: Dist, tokenizer: Tokenizer, prompt: Any,
             options: argparse.Namespace) -> list[str]:
    """Return the generated texts, each including the prompt. Every rank returns the same list. Collective."""
    import torch

    from ezpz_llm.training.evaluate.sampling import sample

    engine = open_model(plan, dist)
    tokens = torch.tensor(prompt.tolist(), device=engine.device)
    generator = torch.Generator().manual_seed(seed_for(options.seed, "sample"))
    if dist.is_main and (remark := tokenizer_warning(plan.source, options.tokenizer)):
        print_lines(f"warning: {remark}", file=sys.stderr)
    texts: list[str] = []
    with engine.evaluating():
        while len(texts) < options.samples:
            rows = tokens.expand(min(options.batch, options.samples - len(texts)), -1)
            ids = sample(engine.next_logits, rows, new_tokens=options.tokens, generator=generator,
                         block_size=plan.model.block_size, top_k=options.top_k or None,
                         vocab_size=min(tokenizer.vocab_size, plan.model.vocab_size),
                         temperature=options.temperature)
            texts += [_text(tokenizer, row.tolist(), len(prompt)) for row in ids]
    return texts


def _text(tokenizer: Tokenizer, ids: list[int], prompt_length: int) -> str:
    """Decode from the prompt's text up to the first generated end-of-text token."""
    end = tokenizer.end_of_text
    stop = ids.index(end, prompt_length) if end in ids[prompt_length:] else len(ids)
    return tokenizer.decode(ids[len(tokenizer.begin_of_text):stop])


def _report(plan: ModelPlan, dist: Dist, texts: list[str], options: argparse.Namespace) -> None:
    from ezpz_llm.core.rundir.records import update_record

    for text in texts:
        print_lines("\n".join(f"| {line}" for line in text.split("\n")), end="\n\n")
    update_record(dist.run_dir, source=plan.source.describe(), samples=texts,
                  sampling={name: getattr(options, name) for name in ("prompt", "tokens", "top_k", "temperature",
                                                                      "seed")})
