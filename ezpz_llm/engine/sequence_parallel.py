"""Sequence parallelism after DeepSpeed Ulysses (Jacobs et al. 2023, arXiv:2309.14509), from outside the model.

Each rank of a group computes its share of every sequence. Only attention needs the rest: there an all-to-all gives
each rank whole sequences of some heads, and another one takes them back. Parameters are whole on every rank, so to
engines the ranks of a sequence are data-parallel ones: the mean of their gradients is the gradient, in every ZeRO
stage alike, and no scale has to be known.

Shapes: B sequences, T tokens of a sequence, S = T / size tokens of a rank's share, H heads, D dimensions of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ezpz_llm.data.samples import IGNORED
from ezpz_llm.dist.mesh import Mesh
from ezpz_llm.engine.deepspeed_import import import_deepspeed
from ezpz_llm.model.gpt import GPT
from ezpz_llm.model.loss import Reduction


def apply(model: GPT, mesh: Mesh, device_type: str) -> None:
    """Let a model take whole sequences and compute this rank's share of them.

    With targets it gives this rank's part of the loss: the mean over the group is the "mean", the sum any other.
    Without, it gives the last token's logits, the same on every rank of the group. All of them make each call.

    Args:
        device_type: what DeepSpeed is imported for.
    """
    deepspeed = import_deepspeed(device_type)
    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), dist_init_required=False)
    group = mesh.real_group("sp")
    for block in model.transformer["h"]:
        block.attn.product = SequenceProduct(block.attn.product, group)
    model.forward = _shared(model.forward, *mesh.place("sp"), group)  # type: ignore[method-assign]


class SequenceProduct(nn.Module):
    """Attention's products over whole sequences, where each rank has a share of them."""

    def __init__(self, inner: nn.Module, group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.inner = inner
        from deepspeed.sequence.layer import DistributedAttention

        self.distributed = DistributedAttention(self._whole, group, scatter_idx=2, gather_idx=1)
        # Traced, its all-to-all would lose its gradient in silence. A decorator would import the compiler.
        self._eager = torch.compiler.disable(self._exchanged)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, S, D) each, keys and values with fewer heads where queries share them, to (B, H, S, D)."""
        return self._eager(q, k, v)

    def _exchanged(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shares = (heads.transpose(1, 2) for heads in (q, k, v))
        return self.distributed(*shares, batch_dim_idx=0).transpose(1, 2)

    def _whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Some heads of whole sequences, (B, T, H / size, D)."""
        return self.inner(*(heads.transpose(1, 2) for heads in (q, k, v))).transpose(1, 2)


def _shared(inner: Callable[..., Tensor], rank: int, size: int,
            group: torch.distributed.ProcessGroup) -> Callable[..., Tensor]:
    """GPT's forward pass on this rank's share of each sequence."""

    @functools.wraps(inner)
    def forward(tokens: Tensor, targets: Tensor | None = None, reduction: Reduction = "mean", *,
                last_only: bool = False) -> Tensor:
        """The loss over all ranks' shares of the tokens, or (with `last_only`) the logits of the last one."""
        if targets is None:
            if not last_only:
                raise ValueError("under sequence parallelism the logits of the last token only are together")
            return last_logits(tokens)
        share = tokens.shape[1] // size
        mine = slice(rank * share, (rank + 1) * share)
        summed = "rows" if reduction == "rows" else "sum"
        loss = inner(tokens[:, mine], targets[:, mine], summed, first=rank * share)
        if reduction != "mean":
            return loss
        # Of all that counts, which may lie in few shares.
        return loss * (size / (targets != IGNORED).sum())

    def last_logits(tokens: Tensor) -> Tensor:
        """The last token's logits, computed by the rank that has it and given to the others."""
        # What is added at the end is seen by none of the tokens before it.
        last = tokens.shape[1] - 1
        tokens = functional.pad(tokens, (0, -tokens.shape[1] % size))
        share = tokens.shape[1] // size
        owner, at = divmod(last, share)
        mine = tokens[:, rank * share:(rank + 1) * share]
        logits = inner(mine, first=rank * share, last_only=rank != owner)
        logits = logits[:, at:at + 1] if rank == owner else torch.zeros_like(logits)
        logits = logits.float().contiguous()
        torch.distributed.all_reduce(logits, group=group)
        return logits

    return forward
