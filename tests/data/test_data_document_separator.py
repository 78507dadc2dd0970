"""The token between documents: found in every kind of corpus that has one, and rejected in others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from megatron_files import write_megatron

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.data.document_separator import SeparatorAdvice, document_separator
from ezpz_llm.training.data.prepare import check_corpus, prepare
from ezpz_llm.training.data.shards import TokenData

ADVICE = SeparatorAdvice("use a tokenizer that has one", "read other text")
END = 256
"""End of text of the tokenizer `bytes`."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))


def write_text(folder: Path) -> Path:
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(50)))
    return path


def write_documents(prefix: Path, *, marked: bool = True, unmarked: int | None = None, empty: int = 0) -> Path:
    """Write documents in Megatron's format, which end with END if they are marked."""
    documents = [np.array([65 + number % 26] * 5 + [END] * (marked and number != unmarked))
                 for number in range(40)]
    bounds = [*[0] * empty, *range(41)]
    return write_megatron(prefix, documents, "uint16", bounds)


def separator_of(corpus: str, tokenizer: str = "bytes") -> int:
    check_corpus(corpus, tokenizer, separates=ADVICE)
    return document_separator(TokenData.open(prepare(corpus, tokenizer, progress=False)), ADVICE)


def test_text_is_separated_by_end_of_text(tmp_path: Path) -> None:
    assert separator_of(str(write_text(tmp_path))) == END


def test_tokenizer_without_end_of_text_is_rejected_before_and_after_preparation(tmp_path: Path) -> None:
    text = str(write_text(tmp_path))
    check_corpus(text, "char")
    for _ in range(2):
        with pytest.raises(UserError, match="the tokenizer char has none") as caught:
            check_corpus(text, "char", separates=ADVICE)
        assert caught.value.instead == "use a tokenizer that has one, or read other text"
        folder = prepare(text, "char", progress=False)
    with pytest.raises(UserError, match="the tokenizer char has none"):
        document_separator(TokenData.open(folder), ADVICE)


@pytest.mark.parametrize("empty", [0, 2])
def test_marked_megatron_documents_are_accepted(tmp_path: Path, empty: int) -> None:
    assert separator_of(str(write_documents(tmp_path / "marked", empty=empty))) == END


@pytest.mark.parametrize(("options", "document"), [({"marked": False}, 0), ({"unmarked": 17}, 17)])
def test_unmarked_megatron_documents_are_rejected(tmp_path: Path, options: dict, document: int) -> None:
    corpus = str(write_documents(tmp_path / "unmarked", **options))
    folder = prepare(corpus, "bytes", progress=False)
    with pytest.raises(UserError, match=f"document {document} does not end with token {END}"):
        document_separator(TokenData.open(folder), ADVICE)
    with pytest.raises(UserError, match="append-eod, or read other text"):
        check_corpus(corpus, "bytes", separates=ADVICE)


def test_every_corpus_of_a_mixture_is_checked(tmp_path: Path) -> None:
    text, marked = write_text(tmp_path), write_documents(tmp_path / "marked")
    assert separator_of(f"{text}=0.5,{marked}=0.5") == END
    unmarked = write_documents(tmp_path / "unmarked", marked=False)
    folder = prepare(f"{text}=0.5,{unmarked}=0.5", "bytes", progress=False)
    with pytest.raises(UserError, match="document 0 does not end"):
        document_separator(TokenData.open(folder), ADVICE)
