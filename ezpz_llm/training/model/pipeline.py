"""Stage of a pipeline: a contiguous part of a GPT, with the plain model's names.

Shapes: B sequences, T tokens, C width, V padded vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ezpz_llm.training.model.config import TABLE
from ezpz_llm.training.model.document_mask import loss_mask
from ezpz_llm.training.model.gpt import GPT, embed, rotation_of
from ezpz_llm.training.model.loss import Reduction
from ezpz_llm.training.model.parameters import placement_of, secondary, set_placement


class PipelineStage(nn.Module):
    """Consecutive blocks of a model, with the embedding in the first stage, and final norm and head in the last.

    Args:
        model: a GPT, possibly on the meta device or with replaced modules, which the stage uses without copying.
        bounds: see `ezpz_llm.training.model.partition`.
        stage: index of this stage.

    Attributes:
        end_of_text: as in `GPT`.
    """

    end_of_text: int | None = None

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
            blocks.add_module(str(number), model.transformer["h"][number])  # keep the block's name
        self.transformer["h"] = blocks
        if self.is_last:
            self.transformer["ln_f"] = model.transformer["ln_f"]
            self.lm_head = model.lm_head
            if self.config.tied:
                set_placement(self.lm_head.weight, secondary(placement_of(TABLE, self.lm_head.weight)))

    @property
    def table(self) -> nn.Module | None:
        """Module with the tied embedding in the first and the last stage; None in other stages, or if untied.

        Both stages hold a copy, over which the gradient must be summed. The first stage owns the parameter.
        """
        if not self.config.tied or not (self.is_first or self.is_last):
            return None
        return self.transformer["wte"] if self.is_first else self.lm_head

    def forward(self, x: Tensor, targets: Tensor | None = None, reduction: Reduction = "mean", *,
                last_only: bool = False, sequences: Tensor | None = None) -> Tensor:
        """Return the next stage's input, (B, T, C) in the parameters' dtype, or in the last stage GPT's output.

        Args:
            x: tokens (B, T) in the first stage, else the output of the previous stage.
            targets, reduction, last_only: as in `GPT.forward`, for the last stage.
            sequences: tokens (B, T), if the last stage computes a loss; for the document mask.
        """
        if self.is_first:
            x = embed(self.config, self.transformer, x)
        rotation = rotation_of(self.config, x.shape[1], x.device)
        mask = loss_mask(self.end_of_text, sequences, x)
        for block in self.transformer["h"]:
            x = block(x, rotation, *mask)
        if not self.is_last:
            return x
        x = self.transformer["ln_f"](x[:, -1:] if last_only else x)
        return self.lm_head(x, targets, reduction)
