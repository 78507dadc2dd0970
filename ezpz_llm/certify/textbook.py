"""The communication of a layout as its papers have it, beside what is issued (imports no torch)."""

from __future__ import annotations

from collections import Counter

from ezpz_llm.engine.batch import Batch
from ezpz_llm.engine.layout import Layout
from ezpz_llm.engine.memory import held_parameters
from ezpz_llm.model.config import ModelConfig

_FP32 = 4


def textbook(layout: Layout, model: ModelConfig, batch: Batch) -> dict[str, int]:
    """Bytes of the buffers of one step on the rank with most parameters, by kind, activations in fp32.

    Gradients (Rajbhandari et al. 2020, arXiv:1910.02054): all-reduced whole; in ZeRO stages 1 and 2
    reduce-scattered, and new parameters gathered; in stage 3 (and FSDP) parameters are gathered in both passes of
    each micro-step. Tensor parallel (Shoeybi et al. 2019, arXiv:1909.08053): two all-reduces of the activations a
    layer in each pass, one after the embedding, one before the head. Pipeline (Huang et al. 2019,
    arXiv:1811.06965): the activations sent to the next stage or received, and their gradient. Sequence parallel
    (Jacobs et al. 2023, arXiv:2309.14509): queries, keys, values and the product exchanged all to all in each pass.
    """
    found: Counter[str] = Counter()
    weights = _FP32 * max(held_parameters(layout, model, stage) for stage in range(layout.pp))
    stage = 3 if layout.engine == "fsdp2" else layout.zero_stage or 0
    if batch.dp_size * layout.sp > 1:
        if stage == 0:
            found["all_reduce"] += weights
        elif stage < 3:
            found["reduce_scatter"] += weights
            found["all_gather"] += weights
        else:
            found["all_gather"] += 2 * weights * batch.accumulation
            found["reduce_scatter"] += weights * batch.accumulation
    layers = -(-model.n_layer // layout.pp)
    tokens = batch.micro_batch * batch.accumulation * (model.block_size // layout.sp)
    activations = _FP32 * tokens * model.n_embd
    if layout.tp > 1:
        found["all_reduce"] += (4 * layers + (2 if layout.pp == 1 else 1)) * activations
    if layout.pp > 1:
        found["send"] += activations
        found["recv"] += activations
    if layout.sp > 1:
        found["all_to_all"] += 2 * layers * _FP32 * tokens * (2 * model.n_embd + 2 * model.kv_width)
    return dict(sorted(found.items()))
