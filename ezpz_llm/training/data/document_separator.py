"""Token that separates the documents of a corpus, for the mask between documents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from msgspec import UNSET

from ezpz_llm.core.base import UserError
from ezpz_llm.training.data.corpora import Options, make_request
from ezpz_llm.training.data.megatron import find_unmarked_document
from ezpz_llm.training.data.shards import TokenData


@dataclass(frozen=True)
class SeparatorAdvice:
    """Advice of a command for a corpus whose documents are not separated.

    Attributes:
        tokenizer: how to choose a tokenizer that has an end-of-text token.
        otherwise: what to type to keep the tokens.
    """

    tokenizer: str
    otherwise: str


def document_separator(data: TokenData, advice: SeparatorAdvice) -> int:
    """Return the end-of-text token, which precedes each document of a corpus, or in a mixture of each corpus.

    The shards of some programs have it after each document. It is then the first token of the next document.

    Raises:
        UserError: the tokenizer has no end-of-text token, or Megatron's tokens have none between documents.
    """
    separator = data.manifest.end_of_text
    if separator is None:
        raise _missing_error(data.manifest.source.corpus, data.manifest.tokenizer.name, advice)
    for part in [part for part, _ in data.parts] or [data]:
        index, shards = part.manifest.document_index, part.manifest.shards
        if index is UNSET or not shards:
            continue
        document = find_unmarked_document(Path(shards[0].file), Path(index), separator)
        if document is not None:
            raise UserError(f"--mask-documents needs an end-of-text token after each document, but document "
                            f"{document:,} does not end with token {separator:,}", where=index,
                            instead="preprocess the text again with Megatron's --append-eod, or "
                                    + advice.otherwise)
    return separator


def check_separator(corpus: str, tokenizer: str | None, advice: SeparatorAdvice) -> None:
    """Check that documents will be separated in a corpus of text that is not prepared yet.

    Raises:
        UserError: the tokenizer has no end-of-text token.
    """
    choice = make_request(corpus, Options(tokenizer)).tokenizer
    if not choice.has_end_of_text:
        raise _missing_error(corpus, choice.name, advice)


def _missing_error(corpus: str, tokenizer: str, advice: SeparatorAdvice) -> UserError:
    return UserError("--mask-documents needs an end-of-text token between documents, but the tokenizer "
                     f"{tokenizer} has none", where=corpus, instead=f"{advice.tokenizer}, or {advice.otherwise}")
