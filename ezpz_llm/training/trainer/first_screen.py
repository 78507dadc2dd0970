"""First screen of a run: the most important settings, and later the expected end time.

The settings take six rows, after launch's two. All other settings are in run.json, and on the console under
--verbose (run_description.py).
"""

from __future__ import annotations

import time

from ezpz_llm.core.base import count_noun
from ezpz_llm.core.base.label_rows import align_rows
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.layout.optimizers import OPTIMIZERS
from ezpz_llm.training.layout.precision_recipes import RECIPES
from ezpz_llm.training.layout.resolve import Resolved
from ezpz_llm.training.model.parameters import parameter_count
from ezpz_llm.training.observe.throughput import format_duration, format_number
from ezpz_llm.training.trainer.plan import RunPlan


def first_screen(plan: RunPlan, data: TokenData, dist: Dist, width: int) -> str:
    """Return rows for model, data, batch, steps, layout and checkpoints, `width` columns wide."""
    model, batch, config = plan.model, plan.resolved.batch, plan.config
    tokens = {split: format_number(count) for split, count in data.manifest.split_tokens.items()}
    per_step = batch.global_batch * model.block_size
    micro_steps = f" x {batch.accumulation} micro-steps" if batch.accumulation > 1 else ""
    return align_rows([
        ("model", f"{config.model}: {parameter_count(model):,} parameters ({count_noun(model.n_layer, 'layer')}, "
                  f"{count_noun(model.n_head, 'head')}, width {model.n_embd})"),
        ("data", f"{config.corpus} as {data.manifest.tokenizer.name}: {tokens['train']} training tokens, "
                 f"{tokens['val']} validation tokens"),
        ("batch", f"{batch.global_batch} x {model.block_size} = {per_step:,} tokens per step "
                  f"({count_noun(batch.micro_batch, 'sequence')} per rank{micro_steps})"),
        ("training", f"{count_noun(config.steps, 'step')} ({format_number(config.steps * per_step)} tokens), "
                     f"{OPTIMIZERS[plan.resolved.optimizer].printed}, peak learning rate {config.lr:.3g} "
                     f"({plan.sources['lr']})"),
        ("layout", f"{plan.resolved.layout.describe(dist.world_size)}, {precision_words(plan.resolved)}, on "
                   f"{count_noun(dist.world_size, f'{dist.device.type} rank')}"),
        ("saves", checkpoint_rule(plan)),
    ], width)


def precision_words(resolved: Resolved) -> str:
    """Return the precision recipe; with master weights, also the dtypes of gradient accumulation and reduction."""
    gradients = resolved.gradients
    if not RECIPES[resolved.precision].has_masters:
        return resolved.precision
    if gradients.accumulated == gradients.reduced:
        return f"{resolved.precision}, gradients accumulated/reduced in {gradients.reduced}"
    return f"{resolved.precision}, gradients accumulated in {gradients.accumulated}, reduced in {gradients.reduced}"


def checkpoint_rule(plan: RunPlan) -> str:
    """Describe when checkpoints are written, and which are kept."""
    config = plan.config
    if config.save_every < 0:
        return "no checkpoints"
    when = f"every {config.save_every} steps and at the end" if config.save_every else "at the end"
    besides = f" and those of every {config.keep_every}th step" if config.keep_every else ""
    return f"{when}, the last {config.keep_last}{besides} kept"


def expected_end(steps_left: int, step_s: float, now: float, width: int) -> str:
    """Return the row with the expected end time of the run.

    Args:
        step_s: seconds per step, without evaluations and checkpoints.
        now: epoch time.
    """
    left_s = steps_left * step_s
    clock = time.strftime("%H:%M" if left_s < 43200 else "%a %d %b %H:%M", time.localtime(now + left_s))
    return align_rows([("end",
                        f"expected at {clock}, in {format_duration(left_s)} ({_short_time(step_s)} per step, "
                        "without evaluations)")], width)


def _short_time(seconds: float) -> str:
    """Format a step time with three digits: 58.6 ms, 2.32 s."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
