"""The output head: hidden states to logits, or with targets to the loss.

Both are one module's, so that whoever gathers parameters by hooking modules has the weight at hand in either.
"""

from __future__ import annotations

from torch import Tensor, nn

from ezpz_llm.model.embedding import Columns
from ezpz_llm.model.loss import Reduction, chosen_chunk, chunked_cross_entropy, cross_entropy


class Head(nn.Linear):
    """A linear layer from C to V logits, without bias, and the loss of its logits.

    `loss_chunk` is the number of tokens whose logits are there at once, None to choose it by the shape, and 0 for
    all of them, kept until the backward pass. `z_loss` is the weight of that term; see `ezpz_llm.model.head`.
    `compiled` lets torch.compile fuse what is done to a chunk's logits.

    Args:
        columns: which of the logits' columns this one gives, where the vocabulary is divided over ranks.
    """

    def __init__(self, width: int, vocabulary: int, columns: Columns = Columns()) -> None:  # noqa: B008
        super().__init__(width, vocabulary, bias=False)
        self.columns = columns
        self.loss_chunk: int | None = None
        self.z_loss = 0.0
        self.compiled = False

    def forward(self, x: Tensor, targets: Tensor | None = None, reduction: Reduction = "mean") -> Tensor:
        """Hidden states (B, T, C) to logits (B, T, V/R), or with targets (B, T) to the loss, see `Reduction`."""
        if targets is None:
            return super().forward(x)
        if self.loss_chunk == 0:
            return cross_entropy(super().forward(x), targets, reduction, self.z_loss, self.columns)
        chunk = self.loss_chunk or chosen_chunk(targets.numel(), len(self.weight), x.device.type)
        return chunked_cross_entropy(x, self.weight, targets, reduction, chunk=chunk, z_loss=self.z_loss,
                                     columns=self.columns, compiled=self.compiled)


def configure_head(model: nn.Module, loss_chunk: int | None, z_loss: float = 0.0) -> None:
    """Set how a model, or the part of one that a rank has, computes its loss."""
    if hasattr(model, "lm_head"):  # not every stage of a pipeline has one
        model.lm_head.loss_chunk, model.lm_head.z_loss = loss_chunk, z_loss


