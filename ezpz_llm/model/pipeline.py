"""A stage of a pipeline: a contiguous part of a GPT, with the plain model's names.

Shapes: B sequences, T tokens, C width, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ezpz_llm.model.gpt import GPT, embed, rotation_of
from ezpz_llm.model.loss import Reduction
from ezpz_llm.model.parameters import TABLE, place, placement_of, secondary


class PipelineStage(nn.Module):
    """Some of a model's blocks; in the first stage the embedding before them, in the last one norm and head.

    `table` is the module with the embedding table where the last stage's head multiplies with the first one's
    embedding: its one parameter is held by both, and its gradient has to be summed over them. Only the first stage
    answers for it. It is None in the stages between, and where the head has a weight of its own.

    Args:
        model: a GPT, also one on the meta device or with modules replaced. Its parts are taken over, not copied.
        bounds: see `ezpz_llm.model.partition`.
        stage: this stage's number.
    """

    def __init__(self, model: GPT, bounds: Sequence[int], stage: int) -> None:
        super().__init__()
        self.config = model.config
        self.is_first, self.is_last = stage == 0, stage == len(bounds) - 2
        names = ("wte", "wpe", "drop") if self.is_first else ()
        self.transformer = nn.ModuleDict({name: model.transformer[name] for name in names
                                          if name in model.transformer})
        if self.is_first and not self.is_last:
            self.transformer["wte"].tied = False  # another rank has the head
        blocks = nn.ModuleList()
        for number in range(bounds[stage], bounds[stage + 1]):
            blocks.add_module(str(number), model.transformer["h"][number])  # keeps the block's name
        self.transformer["h"] = blocks
        if self.is_last:
            self.transformer["ln_f"] = model.transformer["ln_f"]
            self.lm_head = model.lm_head
            if self.config.tied:
                place(self.lm_head.weight, secondary(placement_of(TABLE, self.lm_head.weight)))

    @property
    def table(self) -> nn.Module | None:
        """The embedding table of a stage that has one and shares it with the other end."""
        if not self.config.tied or not (self.is_first or self.is_last):
            return None
        return self.transformer["wte"] if self.is_first else self.lm_head

    def forward(self, x: Tensor, targets: Tensor | None = None, reduction: Reduction = "mean", *,
                last_only: bool = False) -> Tensor:
        """What the next stage receives, (B, T, C) in the parameters' dtype; from the last one what GPT gives.

        Args:
            x: tokens (B, T) in the first stage, else what the stage before gave.
            targets, reduction, last_only: as in `GPT.forward`, for the last stage.
        """
        if self.is_first:
            x = embed(self.config, self.transformer, x)
        rotation = rotation_of(self.config, x.shape[1], x.device)
        for block in self.transformer["h"]:
            x = block(x, rotation)
        if not self.is_last:
            return x
        x = self.transformer["ln_f"](x[:, -1:] if last_only else x)
        return self.lm_head(x, targets, reduction)
