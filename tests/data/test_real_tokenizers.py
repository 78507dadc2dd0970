"""Tokenizers of published models: ids equal those of an independent implementation of the same tokenizer."""

from __future__ import annotations

import functools
import shutil
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import regex
from real_tokenizers import (
    GPT2_PIECES,
    LLAMA_PIECES,
    QWEN_PIECES,
    llama3_json,
    llama3_ranks,
    mistral_files,
    pip_package,
    qwen3_json,
    qwen_ranks,
    read_ranks,
    tiktoken_encoder,
    write_smollm2_json,
)
from small_tokenizers import mixed_text, own_ids

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.data.prepare import prepare
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.data.tokenizers import byte_alphabet, choose_tokenizer

pytestmark = pytest.mark.full

Encode = Callable[[str], Sequence[int]]
_BYTES = 10_000_000


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))


def llama_from_json(_: Path) -> tuple[Path, Encode, int]:
    """tokenizer.json of Llama 3.1 Instruct, whose configuration names <|eot_id|>; the oracle is tiktoken."""
    return llama3_json(), tiktoken_encoder(read_ranks(llama3_ranks()), LLAMA_PIECES), 128_009


def llama_from_ranks(_: Path) -> tuple[Path, Encode, int]:
    """Folder with Meta's tokenizer.model; the oracle is Hugging Face tokenizers."""
    return llama3_ranks().parent, functools.partial(own_ids, llama3_json() / "tokenizer.json"), 128_001


def qwen_from_json(_: Path) -> tuple[Path, Encode, int]:
    """tokenizer.json of Qwen3, whose configuration names <|im_end|>; the oracle is tiktoken after NFC."""
    encode = tiktoken_encoder(read_ranks(qwen_ranks()), QWEN_PIECES)
    return (qwen3_json(),
            lambda text: encode(unicodedata.normalize("NFC", text)), 151_645)


def mistral(name: str, _: Path) -> tuple[Path, Encode, int]:
    file = mistral_files() / name
    return file, functools.partial(own_ids, file), 2


def smollm2(folder: Path) -> tuple[Path, Encode, int]:
    """tokenizer.json made from the vocabulary in a GGUF file; the oracle is tiktoken, between single digits."""
    tokens = write_smollm2_json(folder / "tokenizer.json")
    byte_of = {character: value for value, character in byte_alphabet().items()}
    special = tokens.index("!")  # the first byte follows the special tokens
    ranks = {bytes(map(byte_of.__getitem__, token)): number
             for number, token in enumerate(tokens[special:], special)}
    encode = tiktoken_encoder(ranks, GPT2_PIECES)

    def encode_between_digits(text: str) -> list[int]:
        return [number for part in regex.split(r"(\p{N})", text) for number in encode(part)]

    return folder, encode_between_digits, tokens.index("<|endoftext|>")


MODELS: dict[str, Callable[[Path], tuple[Path, Encode, int]]] = {
    "Llama 3.1, tokenizer.json": llama_from_json,
    "Llama 3, tokenizer.model": llama_from_ranks,
    "Qwen3": qwen_from_json,
    "Mistral v1": functools.partial(mistral, "tokenizer.model.v1"),
    "Mistral v2": functools.partial(mistral, "mistral_instruct_tokenizer_240216.model.v2"),
    "Mistral v3": functools.partial(mistral, "mistral_instruct_tokenizer_240323.model.v3"),
    "SmolLM2": smollm2,
}
"""For each model, a function that returns --tokenizer, the oracle, and the id of the end-of-text token."""


@pytest.mark.parametrize("model", MODELS)
def test_10_mb_have_the_ids_of_an_independent_implementation(model: str, tmp_path: Path) -> None:
    words, encode, end = MODELS[model](tmp_path)
    text = mixed_text(_BYTES, seed=11) + "<|endoftext|></s><|eot_id|> [INST]<|im_end|>"  # as ordinary text
    tokenizer = choose_tokenizer(str(words)).load()
    assert tokenizer.end_of_text == end
    expected = np.array(encode(text), np.uint32)
    (tmp_path / "text.txt").write_text(text, newline="")
    shards = prepare(str(tmp_path / "text.txt"), str(words), workers=2, progress=False)
    data = TokenData.open(shards)
    ids = np.concatenate([data.split("train")[:], data.split("val")[:]])
    np.testing.assert_array_equal(ids, [end, *expected])
    # The copy in the folder of shards is the same tokenizer.
    part = text[:100_000]
    np.testing.assert_array_equal(data.tokenizer.encode(part), encode(part))
    assert data.tokenizer.decode(data.tokenizer.encode("the learning rate")).strip() == "the learning rate"


def test_unsupported_files_are_named(tmp_path: Path) -> None:
    tekken = mistral_files() / "tekken_240718.json"
    shutil.copyfile(tekken, tmp_path / "tekken.json")
    llama4 = pip_package("llama-models==0.3.0") / "llama_models/llama4/tokenizer.model"
    for path, found in ((tekken, "it is a Tekken tokenizer of Mistral, which is not supported"),
                        (tmp_path, "this folder's tokenizer is Tekken"),
                        (llama4, "this file has the tokens of tiktoken, but not the pattern that splits a text"),
                        (qwen_ranks(), "this file is not a tokenizer"),
                        (qwen_ranks().parent, "this folder's tokenizer is tiktoken")):
        with pytest.raises(UserError, match=found) as caught:
            choose_tokenizer(str(path))
        assert str(path) in str(caught.value.where)
        assert "tokenizer.json" in caught.value.instead
