"""What a rank keeps of a forward pass for its backward pass, by arithmetic (imports no torch).

Symbols: T tokens, C width, C_kv width of all keys, I width inside the MLP, H heads, V padded vocabulary, e bytes of
a value in the precision's products (4, or 2 under autocast). After Korthikanti et al. 2022 (arXiv:2205.05198),
section 4.1, for the model as it is here: the residual stream stays in fp32, fused attention keeps no scores.
Buckets, gathered layers and what kernels need for themselves come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from ezpz_llm.engine.layout import Layout
from ezpz_llm.engine.memory import cast_bytes
from ezpz_llm.model.config import ModelConfig
from ezpz_llm.model.partition import stage_bounds


@dataclass(frozen=True)
class Pass:
    """One rank's forward pass.

    `recompute` is as in the trainer, `score_bytes` what attention keeps of a layer's scores (see model/kernel.py),
    `chunk` the tokens whose logits are there at once, 0 for all, `cpu` whether the device is one, `by_rows` whether
    attention is ours for hosts (model/row_attention.py).
    """

    micro_batch: int
    accumulation: int
    precision: str
    recompute: int = 0
    score_bytes: int = 0
    chunk: int = 0
    cpu: bool = False
    by_rows: bool = False


def activation_bytes(layout: Layout, model: ModelConfig, work: Pass) -> int:
    """On the rank that keeps most. A pipeline's stage keeps the micro batches that are on their way after it."""
    bounds = stage_bounds(model, layout.pp, layout.partition)
    return max(_stage(layout, model, work, range(bounds[stage], bounds[stage + 1]), stage)
               for stage in range(layout.pp))


def _stage(layout: Layout, model: ModelConfig, work: Pass, blocks: range, stage: int) -> int:
    tokens = work.micro_batch * model.block_size // layout.sp
    whole = tokens * block_bytes(model, layout.tp, work) + work.score_bytes // layout.tp
    again = sum(work.recompute > 0 and (number + 1) % work.recompute == 0 for number in blocks)
    kept = (len(blocks) - again) * whole + again * 4 * model.n_embd * tokens
    if work.precision in ("bf16", "fp16"):
        kept += cast_bytes(layout, model, len(blocks) - again)
    kept *= min(layout.pp - stage, work.accumulation)
    if again:
        kept += whole  # the block that is being computed again
    return kept + (head_bytes(model, layout.tp, work, tokens) if stage == layout.pp - 1 else 0)


def block_bytes(model: ModelConfig, tp: int, work: Pass) -> float:
    """What one block keeps of one token."""
    width, kv, inside, e = model.n_embd, model.kv_width, model.intermediate_size, _itemsize(work.precision)
    norms = 2 * _norm_bytes(model, work)
    attention = e * width + (e * (width + 2 * kv) + e * width) / tp
    if not work.by_rows:  # which keeps queries, keys and values as it takes them, and nothing else
        attention += 4 * model.n_head / tp
        if work.cpu and model.n_kv_head != model.n_head:
            attention += e * width / tp  # its kernel's output lies in another order than the next layer wants
        if model.position == "rope":
            attention += e * (width + kv) / tp  # turned queries and keys, beside the product they came from
    if model.mlp == "swiglu":
        # Autocast casts the input for each of the two layers that take it.
        mlp = e * width * (1 if e == 4 else 2) + 4 * e * inside / tp
    else:
        mlp = e * width + 2 * e * inside / tp
    return norms + attention + mlp + (2 * width if model.dropout else 0)


def head_bytes(model: ModelConfig, tp: int, work: Pass, tokens: int) -> int:
    """The last norm, the head and the loss, with what they need at the turn from forward to backward."""
    width, columns, e = model.n_embd, model.padded_vocab_size // tp, _itemsize(work.precision)
    norm = tokens * _norm_bytes(model, work)
    if work.chunk:
        # The gradients of the hidden states and of the weight, and one chunk's logits twice.
        return norm + tokens * 4 * width + 4 * columns * width + min(work.chunk, tokens) * columns * (4 + e)
    return norm + tokens * (e * width + 8 * columns)


def _norm_bytes(model: ModelConfig, work: Pass) -> int:
    """A norm's input, which is the residual stream; without a fused kernel the normalised values as well."""
    return 4 * model.n_embd * (2 if model.norm == "rmsnorm" and work.cpu else 1)


def _itemsize(precision: str) -> int:
    return 2 if precision in ("bf16", "fp16") else 4
