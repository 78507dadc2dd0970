"""Defaults that depend on the devices and nodes of a run: compiled blocks, the attention kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import first_value
from ezpz_llm.training.layout.precision_recipes import RECIPES
from ezpz_llm.training.layout.value_source import Origin, ValueSource
from ezpz_llm.training.model.attention import best_attention, read_environment
from ezpz_llm.training.trainer.compile_choice import missing_compiler
from ezpz_llm.training.trainer.plan import RunPlan


def with_device_choices(plan: RunPlan, dist: Dist) -> RunPlan:
    """Return the plan with compilation and attention set to what every rank supports. Collective."""
    config, model = plan.config, plan.model
    compiles = config.compile and plan.sources["compile"].origin is Origin.DERIVED
    missing = missing_compiler(dist.device.type) if compiles else None
    kernel = best_attention(read_environment(dist.device), half=RECIPES[plan.resolved.precision].is_half,
                            dropout=model.dropout, context=model.block_size, head_dim=model.head_dim,
                            masked=config.mask_documents)
    if lacking_package := first_value(dist, missing or None):
        plan = _with_derived(plan, f"a node that lacks {lacking_package}", compile=False)
    if first_value(dist, None if kernel == "flash3" else "lacks flash3") is None and config.attention == "auto":
        plan = _with_derived(plan, "GPUs and packages", attention="flash3")
    return plan


def _with_derived(plan: RunPlan, why: str, **values: Any) -> RunPlan:
    sources = dict.fromkeys(values, ValueSource(Origin.DERIVED, why))
    return replace(plan, config=replace(plan.config, **values), sources={**plan.sources, **sources})
