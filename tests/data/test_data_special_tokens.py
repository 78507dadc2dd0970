"""Special tokens as text in a corpus, as in chats that a template has formatted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_tokenizers import trained

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.data.prepare import prepare
from ezpz_llm.training.data.prompts import encode_prompt
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.hf.source import Source
from ezpz_llm.training.hf.tokenizer import encodes_special_tokens
from ezpz_llm.training.model.config import ModelConfig


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", ["byte-level BPE", "Prepend and Replace"])
def test_they_are_counted_and_encoded_on_request(family: str, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    import tokenizers

    file = trained(family)
    end = "<|endoftext|>" if family == "byte-level BPE" else "</s>"
    chat = f"the rate{end}learning {end}"
    (tmp_path / "chats.jsonl").write_text(json.dumps({"text": chat}) + "\n" + '{"text": "the"}\n')
    plain = TokenData.open(prepare(str(tmp_path / "chats.jsonl"), str(file), val_fraction=0))
    assert ("note: the text has 2 special tokens of the tokenizer, encoded as ordinary text. To encode them as "
            "tokens: ezpz-llm data prepare … --special-tokens true\n") in capsys.readouterr().err
    special = TokenData.open(prepare(str(tmp_path / "chats.jsonl"), str(file), val_fraction=0, special_tokens=True))
    assert "2 special tokens of the tokenizer, encoded as tokens\n" in capsys.readouterr().err
    number = special.tokenizer.end_of_text
    library = tokenizers.Tokenizer.from_file(str(file))
    expected = [id_ for text in (chat, "the")
                for id_ in (number, *library.encode(text, add_special_tokens=False).ids)]
    assert special.split("train")[:].tolist() == expected
    assert plain.split("train")[:].tolist().count(number) == 2 < expected.count(number)
    assert len(plain.split("train")) > len(expected)
    assert "--special-tokens true" in special.manifest.command
    assert number not in encode_prompt(special.tokenizer, chat)
    assert encode_prompt(special.tokenizer, chat, special_tokens=True).tolist() == library.encode(chat).ids


@pytest.mark.parametrize("encodes", [True, False])
def test_prompts_are_encoded_as_the_training_data(encodes: bool, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"data": {"source": {"encodes_special_tokens": encodes}}}))
    folder = tmp_path / "checkpoints/step-00000001"
    model = ModelConfig(n_layer=1, n_head=2, n_embd=8, block_size=4, vocab_size=7)
    assert encodes_special_tokens(Source("checkpoint", folder, model, None, None)) is encodes
    assert encodes_special_tokens(Source("hf", folder, model, None, None))  # as transformers does


def test_tokenizers_without_them_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a<|endoftext|>b" * 9)
    for tokenizer in ("char", str(trained("unigram"))):
        with pytest.raises(UserError, match="cannot encode special tokens in a text"):
            prepare(str(tmp_path / "a.txt"), tokenizer, special_tokens=True, progress=False)
    data = TokenData.open(prepare(str(tmp_path / "a.txt"), "bytes", special_tokens=True, progress=False,
                                  val_fraction=0))
    assert data.split("train")[:4].tolist() == [256, ord("a"), 256, ord("b")]
