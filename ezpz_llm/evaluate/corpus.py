"""A corpus for all ranks: prepared once, by rank 0."""

from __future__ import annotations

from ezpz_llm.data.parquet import TEXT
from ezpz_llm.data.prepare import prepare
from ezpz_llm.data.shards import TokenData
from ezpz_llm.dist import Dist
from ezpz_llm.engine.checkpoint.agree import raise_together
from ezpz_llm.errors import UserError


def open_corpus(corpus: str, tokenizer: str | None, dist: Dist, text_key: str = TEXT) -> TokenData:
    """The corpus as token shards; rank 0 prepares them while the others wait. Collective.

    Raises:
        UserError: as `prepare`; the same on every rank.
    """
    error = None
    try:
        if dist.is_main:
            prepare(corpus, tokenizer, text_key=text_key)
    except UserError as found:
        error = found
    raise_together(dist, error)
    return TokenData.open(prepare(corpus, tokenizer, progress=False, text_key=text_key))
