"""Description of a run before its first step, with the FLOPs and the matmul peak: run.json and the console."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from ezpz_llm.data.shards import TokenData
from ezpz_llm.data.tokenize_corpus import remarks as left_out
from ezpz_llm.dist import Dist
from ezpz_llm.engine.precision import DTYPES, set_products
from ezpz_llm.hf.tokenizer import other_tokenizer
from ezpz_llm.layout.ds_defaults import uses_nvme
from ezpz_llm.layout.optimizers import OPTIMIZERS
from ezpz_llm.model.attention_kernels import attention_kernel
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.gpt import GPT, CausalProduct
from ezpz_llm.model.loss import configure_head
from ezpz_llm.model.parameters import FlopCount, flops_per_token, parameter_count, product_flops_per_token
from ezpz_llm.observe import StepWork, measure_ceiling, peak_flops, run_environment
from ezpz_llm.observe.throughput import short_number
from ezpz_llm.trainer.check_report import remarks, settings
from ezpz_llm.trainer.plan import RunPlan


def announce(plan: RunPlan, data: TokenData, work: StepWork, flops: FlopCount, dist: Dist) -> None:
    """Write and print what the run is. Collective, since every rank's host is listed."""
    environment = run_environment(dist)
    if not dist.is_main:
        return
    plan.resolved.write(dist.run_dir, dist.side)
    dist.side.update_record(
        dist.run_dir, config=asdict(plan.config), model=asdict(plan.model),
        sources={name: str(source) for name, source in plan.sources.items()},
        parameters=parameter_count(plan.model), precision=plan.resolved.precision, environment=environment,
        data=describe_data(data), unigram_entropy=data.unigram_entropy, flops_per_token=flops.as_record(),
        peak=asdict(work.peak) if work.peak else None, ceiling=asdict(work.ceiling))
    print(settings(plan), description(plan, data, work, flops, dist), sep="\n", flush=True)


def describe_data(data: TokenData) -> dict[str, Any]:
    """What the run read, without the tokenizer's table."""
    manifest = data.manifest
    return {"folder": str(data.folder), "source": manifest["source"], "tokenizer": manifest["tokenizer"]["name"],
            "vocab_size": data.vocab_size, "documents": manifest["documents"],
            "tokens": {split: entry["tokens"] for split, entry in manifest["splits"].items()},
            "fingerprint": data.fingerprint}


def description(plan: RunPlan, data: TokenData, work: StepWork, flops: FlopCount, dist: Dist) -> str:
    """What a user wants to see before the first step."""
    model, batch, config = plan.model, plan.resolved.batch, plan.config
    tokens = {split: entry["tokens"] for split, entry in data.manifest["splits"].items()}
    peak = f", peak {work.peak.flops / 1e12:.0f} TFLOP/s" if work.peak else ""
    rows = [
        ("world", f"{dist.world_size} rank(s) ({dist.info.source}), {dist.device.type}{peak}, "
                  f"backend {dist.backend or 'none'}"),
        ("layout", f"{plan.resolved.layout.describe(dist.world_size)}, {plan.resolved.precision}"),
        ("batch", f"{batch.global_batch} sequences of {model.block_size} = {work.tokens} tokens a step "
                  f"({batch.micro_batch} a rank x {batch.accumulation} micro-steps x {batch.dp_size} ranks)"),
        ("model", f"{config.model}: {model.n_layer} layers, {model.n_head} heads, {model.n_embd} wide, "
                  f"{parameter_count(model):,} parameters"),
        ("data", f"{config.corpus} as {data.manifest['tokenizer']['name']} ({data.vocab_size} symbols): "
                 f"{tokens['train']:,} training and {tokens['val']:,} validation tokens, "
                 f"unigram entropy {data.unigram_entropy:.4f} nats"),
        ("optimizer", f"{OPTIMIZERS[plan.resolved.optimizer].printed}, lr {config.lr:g} to {config.min_lr:g} "
                      f"({config.schedule}) over {config.steps} steps, "
                      f"{config.warmup_steps} of warm-up, decay {config.weight_decay:g}, "
                      f"clip {plan.resolved.clip or 'none'}"),
        ("attention", attention(plan, dist)),
        *describe(work, flops),
        ("saves", saves(plan, dist)),
        *(("note", note) for note in (*plan.resolved.notes, *dist.info.notes,
                                      *left_out(data.manifest["source"], shown=0))),
        *(("warning", remark) for remark in (*remarks(plan), *_other_tokens(plan, data))),
    ]
    return "\n".join(f"{name:<11}{text}" for name, text in rows) + "\n"


def _other_tokens(plan: RunPlan, data: TokenData) -> list[str]:
    if plan.init_weights_source is None:
        return []
    return [text] if (text := other_tokenizer(plan.init_weights_source, data.manifest["tokenizer"])) else []


def saves(plan: RunPlan, dist: Dist) -> str:
    """When checkpoints are written, which are kept, and what memory that takes."""
    config = plan.config
    if config.save_every < 0:
        return "none"
    when = f"every {config.save_every} steps and at the end" if config.save_every else "at the end"
    besides = f" and those of every {config.keep_every}th step" if config.keep_every else ""
    text = f"{when}, the last {config.keep_last}{besides} kept"
    if not (config.save_async and config.save_every) or uses_nvme(plan.resolved.layout):
        return text
    # The weights and both moments in fp32, of which each rank writes an equal share.
    megabytes = 12 * parameter_count(plan.model) / dist.world_size / 1e6
    return f"{text}, in the background from a copy in host memory ({megabytes:,.0f} MB a rank)"


def attention(plan: RunPlan, dist: Dist) -> str:
    """Which kernel attention gets, and what it keeps where it is the slow one."""
    dtype = DTYPES.get(plan.resolved.precision, torch.float32)
    kernel = attention_kernel(plan.model, plan.resolved.batch.micro_batch, dist.device, dtype,
                              plan.config.attention == "explicit")
    if not kernel.score_bytes:
        return kernel.name + (", by FlashAttention-3" if plan.config.attention == "flash3" else "")
    keeps = f"{kernel.name}, the slow kernel, which keeps {kernel.score_bytes / 1e9:.3g} GB of scores a layer"
    if plan.config.attention == "explicit":
        return f"{keeps}, as asked for"
    return f"warning: {keeps}; --precision bf16 may allow a faster one"


# Work of a step: its tokens and FLOPs, and the matmul peak of the device.
def step_work(plan: RunPlan, dist: Dist) -> tuple[StepWork, FlopCount]:
    """The work of a step, without FLOPs where the formula and torch's counter differ; and the count itself.

    To be called before there is a model on the device, whose memory the ceiling's matrices would need. Collective.
    """
    batch, precision = plan.resolved.batch, plan.resolved.precision
    set_products(dist.device, precision)
    flops = count_flops(plan.model)
    work = StepWork(batch.micro_batch, batch.accumulation, batch.dp_size, dist.world_size, plan.model.block_size,
                    flops_per_token=flops.model if flops.is_proven else None,
                    causal_flops_per_token=flops.causal if flops.is_proven else None,
                    peak=peak_flops(dist.device, precision), ceiling=measure_ceiling(dist, precision))
    return work, flops


def describe(work: StepWork, flops: FlopCount) -> list[tuple[str, str]]:
    """Both as rows of the announcement."""
    count = (f"{short_number(flops.model)} a token by 6N + 12 L C T, {short_number(flops.causal)} with causal "
             "attention")
    if flops.is_proven:
        rows = [("FLOPs", f"{count}; torch counts the same products")]
    else:
        rows = [("FLOPs", f"warning: {count}; {flops.products:.6g} of them in products, of which torch counts "
                          f"{flops.counted:.6g}: there will be no MFU")]
    if (ceiling := work.ceiling) is not None:
        slowest = (f", {short_number(ceiling.slowest_flops)} on the slowest rank, {ceiling.slowest_rank}"
                   if work.world_size > 1 else "")
        rows.append(("ceiling", f"{short_number(ceiling.flops)} FLOP/s in {ceiling.precision} products alone"
                                f"{slowest}"))
    return rows


# The formula for FLOPs beside torch's own counter, on a model without storage.
def count_flops(config: ModelConfig) -> FlopCount:
    """What a token costs, checked against the model itself.

    Blocks are all alike, so that a model of one and a model of two tell of any number: a tenth of a second.
    """
    one, two = (counted_flops(replace(config, n_layer=layers)) for layers in (1, 2))
    counted = (one + (config.n_layer - 1) * (two - one)) / config.block_size
    return FlopCount(flops_per_token(config), flops_per_token(config, causal=True), product_flops_per_token(config),
                     counted)


def counted_flops(config: ModelConfig) -> int:
    """Forward and backward of one whole sequence, as torch counts them on the meta device.

    Attention is taken by its definition: fused kernels compute the scores again in the backward pass, which torch
    counts and a model's FLOPs do not.
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
