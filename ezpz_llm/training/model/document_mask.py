"""Masks between the documents of a sequence: a token attends only to earlier tokens of its own document.

Positions are not reset at a document's start, as in Llama 3 (arXiv:2407.21783, section 3.2).

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def mask_documents(model: nn.Module, end_of_text: int | None) -> None:
    """Make a model mask other documents when it computes a loss.

    Args:
        model: a GPT or a stage of one.
        end_of_text: token at the start of each document; None disables the mask.
    """
    model.end_of_text = end_of_text


def document_mask(tokens: Tensor, end_of_text: int, dtype: torch.dtype) -> Tensor:
    """Return an additive mask (B, 1, T, T) for attention scores: 0 if a token may be attended to, else -inf.

    Tokens before the first end-of-text token continue a document that started before the sequence.
    """
    documents = (tokens == end_of_text).cumsum(dim=1)
    visible = (documents[:, :, None] == documents[:, None, :]).tril()
    mask = torch.zeros(visible.shape, dtype=dtype, device=tokens.device)
    return mask.masked_fill_(~visible, -math.inf)[:, None]


def loss_mask(end_of_text: int | None, tokens: Tensor | None, x: Tensor) -> tuple[Tensor, ...]:
    """Return the document mask as arguments of a block: one tensor, or none without a mask.

    All blocks share the tensor. It has the dtype of the matmuls, since an attention kernel would convert a mask of
    another dtype in each block, and keep the copy for the backward pass.

    Args:
        tokens: whole sequences (B, T); None if no loss is computed.
        x: activations before the first block.
    """
    if end_of_text is None or tokens is None:
        return ()
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return (document_mask(tokens, end_of_text, dtype),)
