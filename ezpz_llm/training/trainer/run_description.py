"""Description of a run before its first step, in run.json and on the console."""

from __future__ import annotations

import os
from dataclasses import asdict, replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from ezpz_llm.core.base import count_noun, print_lines
from ezpz_llm.core.base.label_rows import align_rows
from ezpz_llm.core.base.memory_groups import usable_memory
from ezpz_llm.core.base.records import as_plain
from ezpz_llm.core.rundir.records import Data, Environment
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.data.tokenize_corpus import reading_notes
from ezpz_llm.training.data.tokenizer_files import copy_files, find_copy
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.collective_network import describe_fallback
from ezpz_llm.training.engine.precision import matmul_dtype, set_tf32
from ezpz_llm.training.hf.tokenizer import tokenizer_mismatch
from ezpz_llm.training.layout.ds_defaults import uses_nvme
from ezpz_llm.training.layout.optimizers import OPTIMIZERS
from ezpz_llm.training.layout.precision_recipes import RECIPES
from ezpz_llm.training.model.attention_kernels import attention_kernel
from ezpz_llm.training.model.config import ModelConfig
from ezpz_llm.training.model.gpt import GPT, CausalProduct
from ezpz_llm.training.model.loss import configure_head
from ezpz_llm.training.model.parameters import FlopCount, flops_per_token, parameter_count, product_flops_per_token
from ezpz_llm.training.observe import StepWork, measure_ceiling, peak_flops, run_environment, terminal_width
from ezpz_llm.training.observe.throughput import format_number
from ezpz_llm.training.trainer.check_report import setting_warnings, settings_by_source, was_checked_by_launch
from ezpz_llm.training.trainer.first_screen import checkpoint_rule, first_screen
from ezpz_llm.training.trainer.memory_estimate import memory_warning
from ezpz_llm.training.trainer.plan import RunPlan
from ezpz_llm.training.trainer.resume import recorded_settings


def describe_run(plan: RunPlan, data: TokenData, work: StepWork, flops: FlopCount, dist: Dist) -> None:
    """Record the run's settings, and print the first screen, or with --verbose all settings. Collective, since the
    record lists every rank's node."""
    environment = run_environment(dist)
    if not dist.is_main:
        return
    plan.resolved.write(dist.run_dir, dist.side)
    dist.side.update_record(
        dist.run_dir, config=recorded_settings(plan.config), model=asdict(plan.model),
        sources={name: source.as_record() for name, source in plan.sources.items()},
        parameters=parameter_count(plan.model), precision=plan.resolved.precision, environment=environment,
        data=_describe_data(data), unigram_entropy=data.unigram_entropy, flops_per_token=flops.as_record(),
        peak=work.peak, ceiling=work.ceiling)
    if data.manifest.tokenizer.kind is not None:
        # Machines without the shards need the tokenizer to use a checkpoint of this run.
        file = find_copy(data.folder, data.manifest.tokenizer)
        dist.side.attempt("the copy of the tokenizer", lambda: copy_files(file, dist.run_dir.tokenizer))
    text = (settings_by_source(plan) + "\n" + description(plan, data, work, flops, dist) if plan.verbose else
            first_screen(plan, data, dist, terminal_width()))
    print_lines(text + align_rows(_remarks(plan, data, dist, work, flops, environment), terminal_width()))


def _describe_data(data: TokenData) -> Data:
    """Describe the run's data for run.json, without the tokenizer's table."""
    manifest = data.manifest
    return Data(folder=str(data.folder), source=as_plain(manifest.source), tokenizer=manifest.tokenizer.name,
                vocab_size=data.vocab_size, documents=manifest.documents,
                tokens=manifest.split_tokens,
                fingerprint=data.fingerprint)


def description(plan: RunPlan, data: TokenData, work: StepWork, flops: FlopCount, dist: Dist) -> str:
    """Return the table that --verbose prints before the first step."""
    model, batch, config = plan.model, plan.resolved.batch, plan.config
    tokens = data.manifest.split_tokens
    peak = f", peak {work.peak.flops / 1e12:.0f} TFLOP/s" if work.peak else ""
    rows = [
        ("world", f"{count_noun(dist.world_size, 'rank')} ({dist.info.source}), {dist.device.type}{peak}, "
                  f"backend {dist.backend or 'none'}"),
        ("layout", f"{plan.resolved.layout.describe(dist.world_size)}, {plan.resolved.precision}"),
        ("batch", f"{count_noun(batch.global_batch, 'sequence')} of {model.block_size} = {work.tokens} tokens "
                  f"per step ({batch.micro_batch} per rank x {count_noun(batch.accumulation, 'micro-step')} x "
                  f"{count_noun(batch.dp_size, 'rank')})"),
        ("model", f"{config.model}: {count_noun(model.n_layer, 'layer')}, {count_noun(model.n_head, 'head')}, "
                  f"{model.n_embd} wide, {parameter_count(model):,} parameters"),
        ("data", f"{config.corpus} as {data.manifest.tokenizer.name} ({data.vocab_size} symbols): "
                 f"{tokens['train']:,} training and {tokens['val']:,} validation tokens, "
                 f"token frequencies alone give a loss of {data.unigram_entropy:.4f}"),
        ("optimizer", f"{OPTIMIZERS[plan.resolved.optimizer].printed}, lr {config.lr:g} to {config.min_lr:g} "
                      f"({config.schedule}) over {count_noun(config.steps, 'step')}, "
                      f"{config.warmup_steps} of warm-up, weight decay {config.weight_decay:g}, "
                      f"clip {plan.resolved.clip or 'none'}"),
        ("attention", describe_attention(plan, dist.device)),
        ("compile", f"{'blocks' if config.compile else 'off'} ({plan.sources['compile']})"),
        *flop_and_peak_rows(work, flops),
        ("saves", _describe_saves(plan, dist)),
    ]
    return "\n".join(f"{name:<11}{text}" for name, text in rows) + "\n"


def _remarks(plan: RunPlan, data: TokenData, dist: Dist, work: StepWork,
             flops: FlopCount, environment: Environment) -> list[tuple[str, str]]:
    """Return notes and warnings; without --verbose, also the warnings among the rows that only `description`
    prints."""
    rows = [] if plan.verbose else [("attention", describe_attention(plan, dist.device)),
                                    *flop_and_peak_rows(work, flops)]
    return [*(("warning", text.removeprefix("warning: ")) for _, text in rows if text.startswith("warning: ")),
            *(("note", note) for note in (*plan.resolved.notes, *dist.info.notes,
                                          *reading_notes(data.manifest.source, shown=0))),
            *(("warning", remark) for remark in (*_setting_warnings(plan, dist), *_tokenizer_warnings(plan, data),
                                                 *_memory_warnings(plan, dist), *_network_warnings(environment)))]


def _network_warnings(environment: Environment) -> list[str]:
    text = None if environment.network is None else describe_fallback(environment.network)
    return [] if text is None else [text]


def _setting_warnings(plan: RunPlan, dist: Dist) -> list[str]:
    return [] if was_checked_by_launch(dist.run_dir, os.environ) else setting_warnings(plan)


def _tokenizer_warnings(plan: RunPlan, data: TokenData) -> list[str]:
    if plan.init_weights_source is None:
        return []
    return [text] if (text := tokenizer_mismatch(plan.init_weights_source, data.manifest.tokenizer)) else []


def _memory_warnings(plan: RunPlan, dist: Dist) -> list[str]:
    if dist.device.type != "cpu":
        return []
    node_bytes, _ = usable_memory()
    text = memory_warning(plan, dist.world_size, dist.info.local_size, node_bytes) if node_bytes else None
    return [] if text is None else [text]


def _describe_saves(plan: RunPlan, dist: Dist) -> str:
    """Describe when checkpoints are written, which are kept, and the CPU memory that saving needs."""
    config, text = plan.config, checkpoint_rule(plan)
    if config.save_every <= 0 or not config.save_async or uses_nvme(plan.resolved.layout):
        return text
    # fp32 weights and two moments, of which each rank writes an equal share.
    megabytes = 12 * parameter_count(plan.model) / dist.world_size / 1e6
    return f"{text}, in the background from a copy in CPU memory ({megabytes:,.0f} MB per rank)"


def describe_attention(plan: RunPlan, device: torch.device) -> str:
    """Describe the attention kernel and, if it stores the scores, their memory and the options that avoid it."""
    dtype = matmul_dtype(plan.resolved.precision)
    masked = plan.config.mask_documents
    kernel = attention_kernel(plan.model, plan.resolved.batch.micro_batch, device, dtype,
                              plan.config.attention == "explicit", masked)
    if not kernel.score_bytes:
        return (kernel.name + (", by FlashAttention-3" if plan.config.attention == "flash3" else "")
                + (", with masks between documents" if masked else ""))
    slow = f"{kernel.name}, the slow kernel, which stores {kernel.score_bytes / 1e9:.3g} GB of scores per layer"
    if plan.config.attention == "explicit":
        return f"{slow}, as requested"
    changes = {"--dropout 0": (replace(plan.model, dropout=0.0), dtype),
               "--precision bf16_autocast": (plan.model, torch.bfloat16)}
    faster = [option for option, (model, changed) in changes.items() if not attention_kernel(
        model, plan.resolved.batch.micro_batch, device, changed, masked=masked).score_bytes]
    return f"warning: {slow}" + (f"; {' or '.join(faster)} allows a faster one" if faster else "")


def step_work(plan: RunPlan, dist: Dist) -> tuple[StepWork, FlopCount]:
    """Return the work of a step, and its FLOP count.

    If the formula and torch's counter differ, `flops_per_token` of the work is None. Call this before a model is on
    the device, since measuring the matmul peak needs memory. Collective.
    """
    batch, products = plan.resolved.batch, RECIPES[plan.resolved.precision].products
    set_tf32(dist.device, plan.resolved.precision)
    flops = count_flops(plan.model)
    work = StepWork(batch.micro_batch, batch.accumulation, batch.dp_size, dist.world_size, plan.model.block_size,
                    flops_per_token=flops.model if flops.is_proven else None,
                    causal_flops_per_token=flops.causal if flops.is_proven else None,
                    peak=peak_flops(dist.device, products), ceiling=measure_ceiling(dist, products))
    return work, flops


def flop_and_peak_rows(work: StepWork, flops: FlopCount) -> list[tuple[str, str]]:
    """Return the FLOP count and the measured matmul peak as rows of `description`."""
    count = (f"{format_number(flops.model)} per token, forward and backward (6N + 12 L C T); "
             f"{format_number(flops.causal)} without the half of attention that the causal mask hides")
    if flops.is_proven:
        rows = [("FLOPs", f"{count}; torch's FLOP counter agrees")]
    else:
        rows = [("FLOPs", f"warning: {count}; {flops.products:.6g} of them in matmuls, but torch's FLOP "
                          f"counter reports {flops.counted:.6g}: MFU is not shown")]
    if (ceiling := work.ceiling) is not None:
        slowest = (f"; slowest: rank {ceiling.slowest_rank}, {format_number(ceiling.slowest_flops)}"
                   if work.world_size > 1 else "")
        rows.append(("peak", f"{format_number(ceiling.flops)} FLOP/s measured "
                             f"({ceiling.precision} matmul{slowest})"))
    return rows


def count_flops(config: ModelConfig) -> FlopCount:
    """Return the FLOPs per token by the formula, and as torch counts them on a model without storage.

    All blocks are identical, so the FLOPs of one and of two blocks determine the FLOPs of any number of blocks.
    This takes 0.1 s.
    """
    one_layer, two_layers = (counted_flops(replace(config, n_layer=layers)) for layers in (1, 2))
    counted = (one_layer + (config.n_layer - 1) * (two_layers - one_layer)) / config.block_size
    return FlopCount(flops_per_token(config), flops_per_token(config, causal=True), product_flops_per_token(config),
                     counted)


def counted_flops(config: ModelConfig) -> int:
    """Return torch's count for the forward and backward pass of one sequence, on the meta device.

    Attention uses the explicit kernel: fused kernels recompute the scores in the backward pass, which torch counts
    but model FLOPs exclude.
    """
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(1, config.block_size, dtype=torch.long)
    configure_head(model, 0)
    for module in model.modules():
        if isinstance(module, CausalProduct):
            module.explicit = True
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    return counter.get_total_flops()
