"""Samples of generated text during a run."""

from __future__ import annotations

import numpy as np
import torch

from ezpz_llm.core.base import UserError
from ezpz_llm.training.data.prompts import encode_prompt
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.dist.seeds import seed_for
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.evaluate.sampling import sample
from ezpz_llm.training.trainer.callbacks.callback import Callback, CallbackContext
from ezpz_llm.training.trainer.config import TrainConfig
from ezpz_llm.training.trainer.plan import RunPlan


class TextSamples(Callback):
    """Generated text every `--sample-every` steps, on the console."""

    logs_evaluation = False

    def __init__(self, plan: RunPlan, prompt: np.ndarray, data: TokenData, engine: Engine) -> None:
        self.evaluate_every = plan.config.sample_every
        self._plan, self._prompt, self._data, self._engine = plan, prompt, data, engine

    def on_evaluate(self, context: CallbackContext) -> None:
        """Generate a text; a failure is only a warning."""
        context.dist.optional.attempt_together(f"the sample after step {context.step}",
                                               lambda: self._generate(context))

    def _generate(self, context: CallbackContext) -> None:
        config = self._plan.config
        prompt = torch.from_numpy(self._prompt)[None].to(self._engine.device)
        generator = torch.Generator().manual_seed(seed_for(config.seed, "sample", context.step))
        ids = sample(self._engine.next_logits, prompt, new_tokens=config.sample_tokens, generator=generator,
                     block_size=self._plan.model.block_size, vocab_size=self._data.vocab_size,
                     top_k=config.top_k or None, temperature=config.temperature)
        if context.dist.is_main:
            tokenizer = self._data.tokenizer
            text = tokenizer.decode(ids[0, len(tokenizer.begin_of_text):].tolist())
            lines = "\n".join(f"  | {line}" for line in text.splitlines())
            context.print(f"\nsample after step {context.step}:\n{lines}\n")


def prompt_tokens(config: TrainConfig, data: TokenData) -> np.ndarray:
    """Return the tokens of the prompt, (T,) int64. Call this before training, so that an invalid prompt fails
    early.

    Raises:
        UserError: the tokenizer cannot encode `--prompt`.
    """
    try:
        return encode_prompt(data.tokenizer, "\n" if config.prompt is None else config.prompt,
                             data.manifest.source.encodes_special_tokens)
    except UserError as error:
        if config.prompt is not None:
            raise UserError(error.found, where="--prompt", instead=error.instead) from error
        return data.first_tokens(1).astype(np.int64)
