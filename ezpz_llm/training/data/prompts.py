"""Tokens of a text that a model continues, and of a given continuation."""

from __future__ import annotations

import numpy as np

from ezpz_llm.training.data.special_tokens import encoding_special_tokens
from ezpz_llm.training.data.tokenizers import Tokenizer


def encode_prompt(tokenizer: Tokenizer, text: str, special_tokens: bool = False) -> np.ndarray:
    """Return the ids of a text, (T,) int64, after the begin-of-text ids of the tokenizer's own library, if any.

    Args:
        special_tokens: encode special tokens in the text as tokens, as in the model's training data.
    """
    with encoding_special_tokens(tokenizer, special_tokens):
        return np.concatenate((tokenizer.begin_of_text, tokenizer.encode(text))).astype(np.int64)


def encode_continuation(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a context and of the text that continues it, both int64, as lm-evaluation-harness does.

    The continuation's ids are those of the joined text after the context's. Encoded alone, it would be a new text,
    before which many tokenizers add a space. White space at the end of the context belongs to the continuation.
    """
    context, space = context.rstrip(), context[len(context.rstrip()):]
    prompt = encode_prompt(tokenizer, context)
    return prompt, encode_prompt(tokenizer, context + space + continuation)[len(prompt):]
