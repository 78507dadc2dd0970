"""Rules for parallel degrees and combinations of layout options, each with its reason (imports no torch).

Rules for single ZeRO options are in knobs.py. suggestions.py searches for legal alternatives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ezpz_llm.core.base import UserError, count_noun
from ezpz_llm.training.layout.knobs import KNOBS, LayoutCheck, Problem, Repair, Rule, RuleResults
from ezpz_llm.training.layout.layout import Layout


def validate(case: LayoutCheck) -> tuple[Layout, tuple[str, ...], Problem | None]:
    """Return the layout to run, notes about it, and the problem if it cannot run.

    Raises:
        UserError: the batch sizes contradict each other or the data-parallel size.
    """
    notes: list[str] = []
    for rule in RULES:
        result = next(rule(case), None)
        if isinstance(result, Problem):
            return case.layout, tuple(notes), result
        if result is not None:
            case = replace(case, layout=result.layout)
            notes.append(result.note)
    return case.layout, tuple(notes), None


def check_world_size(case: LayoutCheck) -> RuleResults:
    """Require that tp x pp x sp divides the world size."""
    layout = case.layout
    model_ranks = layout.tp * layout.pp * layout.sp
    if case.world_size % model_ranks:
        yield Problem(f"{count_noun(case.world_size, 'rank')} cannot be divided into groups of tp {layout.tp} x "
                      f"pp {layout.pp} x sp {layout.sp} = {model_ranks}", ("ranks", *_degrees_above_one(layout)),
                      ("ranks", "tp", "pp", "sp"))


def check_engine(case: LayoutCheck) -> RuleResults:
    """Require DeepSpeed for pipelines, and reject fsdp2 with tensor parallelism."""
    layout = case.layout
    if layout.pp > 1 and layout.engine != "deepspeed":
        yield Problem(f"engine {layout.engine} does not support pipelines; deepspeed does", ("engine", "pp"),
                      ("engine", "pp"))
    if layout.tp > 1 and layout.engine == "fsdp2":
        yield Problem("engine fsdp2 does not support tensor parallelism", ("engine", "tp"), ("engine", "tp"))


def check_pipeline_stage(case: LayoutCheck) -> RuleResults:
    """Require ZeRO stage 1 without optimizer offload for pipelines; change stage 0 to 1."""
    layout = case.layout
    if layout.pp == 1:
        return
    if layout.zero.stage in (2, 3):
        yield Problem(f"DeepSpeed rejects ZeRO stage {layout.zero.stage} in pipelines: a pipeline keeps whole "
                      "gradients until its last micro-batch",
                      ("stage", "pp"), ("stage", "pp"))
    if layout.zero.offload_optimizer is not None:
        yield Problem("pipelines do not support optimizer offload",
                      ("offload_optimizer", "pp"), ("offload", "pp"))
    if layout.zero.stage == 0:
        yield Repair(layout.with_zero(stage=1),
                     "using ZeRO stage 1 instead of 0: in a pipeline, DeepSpeed's stage 0 clips each "
                     "pipeline stage by its own gradient norm")


def check_pipeline_sequences(case: LayoutCheck) -> RuleResults:
    """Reject sequence parallelism in pipelines."""
    if case.layout.pp > 1 and case.layout.sp > 1:
        yield Problem("pipelines do not support sequence parallelism: stages pass on whole sequences",
                      ("pp", "sp"), ("sp", "pp"))


def check_heads(case: LayoutCheck) -> RuleResults:
    """Require that tp x sp divides the attention heads and the key/value heads."""
    layout, model = case.layout, case.model
    parts = layout.tp * layout.sp
    if model is None:
        return
    by = " x ".join(f"{name} {getattr(layout, name)}" for name in ("tp", "sp") if getattr(layout, name) > 1)
    for kind, count in (("attention heads", model.n_head), ("key/value heads", model.n_kv_head)):
        if count % parts:
            yield Problem(f"{count} {kind} cannot be divided by {by}{f' = {parts}' if 'x' in by else ''}",
                          _degrees_above_one(layout, "tp", "sp"), ("tp", "sp"))


def check_widths(case: LayoutCheck) -> RuleResults:
    """Require that tp divides the MLP width and the padded vocabulary."""
    tp, model = case.layout.tp, case.model
    if model is not None and model.intermediate_size % tp:
        yield Problem(f"the MLP width of {model.intermediate_size} cannot be divided by tp {tp}", ("tp",),
                      ("tp",))
    if model is not None and model.padded_vocab_size % tp:
        # Never padded silently: more rows change the softmax and the checkpoints.
        yield Problem(f"the vocabulary of {model.padded_vocab_size} rows cannot be divided by tp {tp}", ("tp",),
                      ("tp", "vocab_multiple"))


def check_pipeline_depth(case: LayoutCheck) -> RuleResults:
    """Require at least one block per pipeline stage."""
    if case.model is not None and case.layout.pp > case.model.n_layer:
        yield Problem(f"{case.model.n_layer} blocks cannot be divided among {case.layout.pp} pipeline stages",
                      ("pp",), ("pp", "n_layer"))


def check_sequence_length(case: LayoutCheck) -> RuleResults:
    """Require that sp divides the sequence length."""
    sp, model = case.layout.sp, case.model
    if model is not None and model.block_size % sp:
        yield Problem(f"sequences of {model.block_size} tokens cannot be divided by sp {sp}", ("sp",),
                      ("sp", "block_size"))


def check_pipeline_bubble(case: LayoutCheck) -> RuleResults:
    """Note the pipeline bubble if there are fewer micro-batches than stages."""
    stages = case.layout.pp
    if stages == 1 or case.batch is None:
        return
    micro_batches = case.batch(case.layout.dp_size(case.world_size)).accumulation
    if micro_batches < stages:
        bubble = (stages - 1) / (micro_batches + stages - 1)
        count = f"{micro_batches} micro-batch{'' if micro_batches == 1 else 'es'}"
        yield Repair(case.layout, f"{stages} pipeline stages idle {bubble:.0%} of the time with {count} "
                                  f"a step: (p - 1)/(m + p - 1); "
                                  f"--gradient-accumulation-steps {4 * stages} reduces it to "
                                  f"{(stages - 1) / (5 * stages - 1):.0%}")


RULES: tuple[Rule, ...] = (
    check_world_size,
    *(rule for knob in KNOBS for rule in knob.rules),
    check_engine,
    check_pipeline_stage,
    check_pipeline_sequences,
    check_heads,
    check_widths,
    check_pipeline_depth,
    check_sequence_length,
    check_pipeline_bubble,
)


def check_gradient_scaling(values: Mapping[str, Any], layout: Layout, where: str) -> None:
    """Reject keys for gradient scaling that DeepSpeed would reject later, on every rank.

    Args:
        values: the keys of a ds_config that DeepSpeed reads.

    Raises:
        UserError: DeepSpeed does not support a key in this ZeRO stage.
    """
    # Stage 1 uses all-reduce, before which DeepSpeed can scale gradients.
    if (layout.zero.stage or 0) >= 2 and values.get("zero_optimization", {}).get("reduce_scatter", True):
        for key, neutral in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
            if values.get(key, neutral) != neutral:
                raise UserError(f"{key} is {json.dumps(values[key])}, but ZeRO stage {layout.zero.stage} uses "
                                "reduce-scatter, and DeepSpeed cannot scale gradients before it", where=where,
                                instead=f"delete {key}, or set \"reduce_scatter\": false in \"zero_optimization\"")


def _degrees_above_one(layout: Layout, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names or ("tp", "pp", "sp") if getattr(layout, name) > 1)
