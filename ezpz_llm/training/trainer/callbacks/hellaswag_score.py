"""HellaSwag scores during a run."""

from __future__ import annotations

from collections.abc import Sequence

from ezpz_llm.core.base import UserError, user_path
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import run_together
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.evaluate import hellaswag
from ezpz_llm.training.evaluate.hellaswag import Item, read_items
from ezpz_llm.training.trainer.callbacks.callback import Callback, CallbackContext
from ezpz_llm.training.trainer.config import TrainConfig
from ezpz_llm.training.trainer.plan import RunPlan


class HellaSwagScore(Callback):
    """Accuracies on HellaSwag every `--hellaswag-every` steps, in metrics.jsonl, run.json, and on the console."""

    def __init__(self, plan: RunPlan, items: Sequence[Item], data: TokenData, engine: Engine) -> None:
        self.evaluate_every = plan.config.hellaswag_every
        self._plan, self._items, self._data, self._engine = plan, items, data, engine

    def on_evaluate(self, context: CallbackContext) -> None:
        """Score the items; a failure is only a warning."""
        context.dist.optional.attempt_together(f"HellaSwag after step {context.step}", lambda: self._score(context))

    def _score(self, context: CallbackContext) -> None:
        score = hellaswag.score(
            self._engine.row_losses, self._items, self._data.tokenizer, device=self._engine.device,
            mesh=context.dist.mesh, block_size=self._plan.model.block_size,
            items_at_once=max(1, self._plan.resolved.batch.micro_batch // hellaswag.ENDINGS))
        context.log("hellaswag_acc", score.acc)
        context.log("hellaswag_acc_norm", score.acc_norm)
        if context.dist.is_main:
            context.dist.side.update_record(context.dist.run_dir,
                                            hellaswag={"step": context.step, **score.as_record()})
        context.print(f"HellaSwag after step {context.step}: acc_norm {score.acc_norm:.4f}, acc {score.acc:.4f} "
                      f"({score.items} items, normalized by tokens)")


def hellaswag_items(config: TrainConfig, data: TokenData, dist: Dist) -> list[Item]:
    """Return the HellaSwag items to score, if any.

    Raises:
        UserError: the file does not exist, or the tokenizer cannot encode every text. The same on every rank.
    """
    if config.hellaswag is None:
        return []
    if data.manifest.tokenizer.table is not None:
        raise UserError("the tokenizer char can encode only the characters of its corpus", where="--hellaswag",
                        instead="--tokenizer bytes or gpt2")
    path = user_path(config.hellaswag)
    return run_together(dist, lambda: read_items(path, config.hellaswag_items or None))
