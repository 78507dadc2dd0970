"""Special tokens, such as <|im_start|>, that a corpus contains as text."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from ezpz_llm.core.base import UserError
from ezpz_llm.training.data.tokenizer_files import FileTokenizer
from ezpz_llm.training.data.tokenizers import Tokenizer


def special_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return the pattern of the text of any special token; None if the tokenizer has none."""
    names = sorted(tokenizer.special_tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None


def check_special_tokens(tokenizer: Tokenizer) -> None:
    """Check that a tokenizer can encode special tokens in a text.

    Raises:
        UserError: it cannot.
    """
    is_other = isinstance(tokenizer, FileTokenizer) and tokenizer.entry.kind != "tokenizers"
    if is_other or not tokenizer.special_tokens:
        raise UserError(f"the tokenizer {tokenizer.name} cannot encode special tokens in a text",
                        where="--special-tokens", instead="a tokenizer.json of the same model, or gpt2")


@contextlib.contextmanager
def encoding_special_tokens(tokenizer: Tokenizer, enabled: bool) -> Iterator[None]:
    """Encode the text of special tokens as these tokens inside the context, if `enabled`."""
    tokenizer.encodes_special_tokens = enabled
    try:
        yield
    finally:
        tokenizer.encodes_special_tokens = False
