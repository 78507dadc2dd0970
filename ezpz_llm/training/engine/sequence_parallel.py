"""Sequence parallelism as in DeepSpeed Ulysses (Jacobs et al. 2023, arXiv:2309.14509), added to an existing model.

Each rank of a group computes its share of every sequence. Only attention needs whole sequences: an all-to-all
before it gives each rank whole sequences of some heads, and another all-to-all after it reverses this. Parameters
are replicated, so the ranks of a sequence are data-parallel ranks to engines: the mean of their gradients is the
gradient, in every ZeRO stage, without further scaling.

Shapes: B sequences, T tokens per sequence, S = T / size tokens in a rank's share, H heads, D head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ezpz_llm.core.base import UserError
from ezpz_llm.training.data.samples import IGNORED
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.collective_values import wrong_kinds
from ezpz_llm.training.dist.mesh import Mesh
from ezpz_llm.training.engine.deepspeed_import import import_deepspeed
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.loss import Reduction


def apply(model: GPT, mesh: Mesh, device_type: str) -> None:
    """Change a model so that it takes whole sequences and computes only this rank's share of them.

    With targets, the model returns this rank's part of the loss: the group's mean is the "mean" reduction, the
    group's sum any other reduction. Without targets, it returns the last token's logits on every rank. Calls are
    collective in the group.

    Args:
        device_type: device type to import DeepSpeed for.

    Raises:
        UserError: the backend's all-to-all is not trusted, and returns wrong values.
    """
    deepspeed = import_deepspeed(device_type)
    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), dist_init_required=False)
    group = mesh.real_group("sp")
    if not DEVICES[device_type].exact_all_to_all:
        _require_exact_all_to_all(group, torch.device(device_type))
    for block in model.transformer["h"]:
        block.attn.product = _SequenceProduct(block.attn.product, group)
    model.forward = _shared(model.forward, *mesh.place("sp"), group)  # type: ignore[method-assign]


def _require_exact_all_to_all(group: torch.distributed.ProcessGroup, device: torch.device) -> None:
    """Check the values of an all-to-all in this rank's group. Collective among all ranks.

    Raises:
        UserError: a rank of any group got wrong values; the same on every rank.
    """
    errors = torch.tensor(len(wrong_kinds(group, device, ("all-to-all",))), device=device)
    torch.distributed.all_reduce(errors, op=torch.distributed.ReduceOp.MAX)
    if errors.item():
        raise UserError(f"all-to-all returns wrong values on {device.type}, and sequence parallelism depends on it",
                        where="sp", instead="--sp 1, or a torch that passes python3 -m ezpz_llm.test_dist")


class _SequenceProduct(nn.Module):
    """Attention over whole sequences, of which each rank has a share."""

    def __init__(self, inner: nn.Module, group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.inner = inner
        from deepspeed.sequence.layer import DistributedAttention

        self.distributed = DistributedAttention(self._whole, group, scatter_idx=2, gather_idx=1)
        # When traced, the all-to-all silently loses its gradient. A decorator would import the compiler.
        self._eager = torch.compiler.disable(self._exchange)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        """Compute attention of (B, H, S, D) each; keys and values may have fewer heads. Returns (B, H, S, D).

        Args:
            mask: document mask of whole sequences, if any, (B, 1, T, T).
        """
        return self._eager(q, k, v, *mask)

    def _exchange(self, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        shares = (heads.transpose(1, 2) for heads in (q, k, v))
        # DeepSpeed passes what follows its own two arguments, batch_dim_idx and rotary_pos_emb, to `_whole`.
        return self.distributed(*shares, 0, None, *mask).transpose(1, 2)

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        """Compute attention of some heads over whole sequences, (B, T, H / size, D)."""
        return self.inner(*(heads.transpose(1, 2) for heads in (q, k, v)), *mask).transpose(1, 2)


def _shared(inner: Callable[..., Tensor], rank: int, size: int,
            group: torch.distributed.ProcessGroup) -> Callable[..., Tensor]:
    """Wrap GPT's forward pass to compute this rank's share of each sequence."""

    @functools.wraps(inner)
    def forward(tokens: Tensor, targets: Tensor | None = None, reduction: Reduction = "mean", *,
                last_only: bool = False) -> Tensor:
        """Return this rank's part of the loss, or (with `last_only`) the logits of the last token."""
        if targets is None:
            if not last_only:
                raise ValueError("sequence parallelism provides only the logits of the last token (last_only=True)")
            return last_logits(tokens)
        share = tokens.shape[1] // size
        own_share = slice(rank * share, (rank + 1) * share)
        summed = "rows" if reduction == "rows" else "sum"
        loss = inner(tokens[:, own_share], targets[:, own_share], summed, first=rank * share,
                     sequences=tokens)
        if reduction != "mean":
            return loss
        # Divide by the targets of all shares, which may be unevenly distributed.
        return loss * (size / (targets != IGNORED).sum())

    def last_logits(tokens: Tensor) -> Tensor:
        """Return the last token's logits on all ranks; the rank with the last token computes them."""
        # Tokens do not attend to the padding after them.
        last = tokens.shape[1] - 1
        tokens = functional.pad(tokens, (0, -tokens.shape[1] % size))
        share = tokens.shape[1] // size
        owner, at = divmod(last, share)
        own_share = tokens[:, rank * share:(rank + 1) * share]
        logits = inner(own_share, first=rank * share, last_only=rank != owner)
        logits = logits[:, at:at + 1] if rank == owner else torch.zeros_like(logits)
        logits = logits.float().contiguous()
        torch.distributed.all_reduce(logits, group=group)
        return logits

    return forward
