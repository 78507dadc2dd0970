"""The rules that a layout must pass, each with its reason (imports no torch); suggest.py finds what passes instead.

Rules of single ZeRO options are in knobs.py, rules of degrees and of combinations are here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ezpz_llm.base import UserError
from ezpz_llm.layout.knobs import KNOBS, Case, Found, Problem, Repair, Rule
from ezpz_llm.layout.layout import Layout


def validate(case: Case) -> tuple[Layout, tuple[str, ...], Problem | None]:
    """The layout to run, what to say about it, and what is wrong with it if it cannot run.

    Raises:
        UserError: the batch does not work out.
    """
    notes: list[str] = []
    for rule in RULES:
        found = next(rule(case), None)
        if isinstance(found, Problem):
            return case.layout, tuple(notes), found
        if found is not None:
            case = replace(case, layout=found.layout)
            notes.append(found.note)
    return case.layout, tuple(notes), None


def check_world_size(case: Case) -> Found:
    """The ranks must be divisible into groups of tp x pp x sp."""
    layout = case.layout
    others = layout.tp * layout.pp * layout.sp
    if case.world_size % others:
        yield Problem(f"{case.world_size} ranks cannot be divided into groups of tp {layout.tp} x pp {layout.pp} x "
                      f"sp {layout.sp} = {others}", ("ranks", *_above_one(layout)), ("ranks", "tp", "pp", "sp"))


def check_engine(case: Case) -> Found:
    """Torch's engines have no pipeline, and fully_shard is not combined with tensor parallel."""
    layout = case.layout
    if layout.pp > 1 and layout.engine != "deepspeed":
        yield Problem(f"engine {layout.engine} has no pipeline: DeepSpeed's runs the stages", ("engine", "pp"),
                      ("engine", "pp"))
    if layout.tp > 1 and layout.engine == "fsdp2":
        yield Problem("fsdp2 divides whole layers over all ranks, and tensor parallel divides each layer: the two "
                      "are not combined here", ("engine", "tp"), ("engine", "tp"))


def check_pipeline_stage(case: Case) -> Found:
    """A pipeline takes ZeRO stage 1 without offload."""
    layout = case.layout
    if layout.pp == 1:
        return
    if layout.zero.stage in (2, 3):
        yield Problem(f"a pipeline keeps whole gradients until its last micro batch: ZeRO stage "
                      f"{layout.zero.stage}, which divides them, is refused by DeepSpeed",
                      ("stage", "pp"), ("stage", "pp"))
    if layout.zero.offload_optimizer is not None:
        yield Problem("a pipeline's optimizer steps on the device: it is not offloaded here",
                      ("offload_optimizer", "pp"), ("offload", "pp"))
    if layout.zero.stage == 0:
        yield Repair(layout.with_zero(stage=1),
                     "ZeRO stage 1 in place of 0: under a pipeline DeepSpeed's stage 0 clips each stage by a norm "
                     "of its own")


def check_pipeline_sequences(case: Case) -> Found:
    """Pipeline and sequence parallel are not combined."""
    if case.layout.pp > 1 and case.layout.sp > 1:
        yield Problem("pipeline stages pass on whole sequences: pipeline and sequence parallel are not combined "
                      "here", ("pp", "sp"), ("sp", "pp"))


def check_heads(case: Case) -> Found:
    """Attention heads, and key/value heads, must be divisible by tp x sp."""
    layout, model = case.layout, case.model
    parts = layout.tp * layout.sp
    if model is None:
        return
    by = " x ".join(f"{name} {getattr(layout, name)}" for name in ("tp", "sp") if getattr(layout, name) > 1)
    for kind, count in (("attention heads", model.n_head), ("key/value heads", model.n_kv_head)):
        if count % parts:
            yield Problem(f"{count} {kind} cannot be divided by {by}{f' = {parts}' if 'x' in by else ''}",
                          _above_one(layout, "tp", "sp"), ("tp", "sp"))


def check_widths(case: Case) -> Found:
    """The MLP's width and the rows of the vocabulary must be divisible by tp."""
    tp, model = case.layout.tp, case.model
    if model is not None and model.intermediate_size % tp:
        yield Problem(f"the MLP's width of {model.intermediate_size} cannot be divided by tp {tp}", ("tp",),
                      ("tp",))
    if model is not None and model.padded_vocab_size % tp:
        # Not padded in silence: more rows are another model, to its softmax and to its checkpoints.
        yield Problem(f"the vocabulary of {model.padded_vocab_size} rows cannot be divided by tp {tp}", ("tp",),
                      ("tp", "vocab_multiple"))


def check_pipeline_depth(case: Case) -> Found:
    """A model needs a block for each pipeline stage."""
    if case.model is not None and case.layout.pp > case.model.n_layer:
        yield Problem(f"{case.model.n_layer} blocks cannot be divided among {case.layout.pp} pipeline stages",
                      ("pp",), ("pp", "n_layer"))


def check_context(case: Case) -> Found:
    """The sequence length must be divisible by sp."""
    sp, model = case.layout.sp, case.model
    if model is not None and model.block_size % sp:
        yield Problem(f"sequences of {model.block_size} tokens cannot be divided by sp {sp}", ("sp",),
                      ("sp", "block_size"))


def check_pipeline_bubble(case: Case) -> Found:
    """Fewer micro batches than stages leave a pipeline idle: a note, with the number that helps."""
    stages = case.layout.pp
    if stages == 1 or case.batch is None:
        return
    micro_batches = case.batch(case.layout.dp_size(case.world_size)).accumulation
    if micro_batches < stages:
        bubble = (stages - 1) / (micro_batches + stages - 1)
        count = f"{micro_batches} micro batch{'' if micro_batches == 1 else 'es'}"
        yield Repair(case.layout, f"{stages} pipeline stages idle {bubble:.0%} of the time with {count} "
                                  f"a step: (p - 1)/(m + p - 1); "
                                  f"--gradient-accumulation-steps {4 * stages} would make it "
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
    check_context,
    check_pipeline_bubble,
)


def check_gradient_scaling(values: Mapping[str, Any], layout: Layout, where: str) -> None:
    """Refuse keys that scale gradients in a way that DeepSpeed rejects on every rank, after they have started.

    Args:
        values: the keys of a ds_config that DeepSpeed reads.

    Raises:
        UserError: names the key and what to write instead.
    """
    # Stage 1 all-reduces; a scatter cannot scale before it reduces.
    if (layout.zero.stage or 0) >= 2 and values.get("zero_optimization", {}).get("reduce_scatter", True):
        for key, neutral in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
            if values.get(key, neutral) != neutral:
                raise UserError(f"{key} is {json.dumps(values[key])}, and ZeRO stage {layout.zero.stage} reduces "
                                "by scattering: DeepSpeed does not scale gradients before that", where=where,
                                instead=f"no {key}, or \"reduce_scatter\": false in \"zero_optimization\"")


def _above_one(layout: Layout, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names or ("tp", "pp", "sp") if getattr(layout, name) > 1)
