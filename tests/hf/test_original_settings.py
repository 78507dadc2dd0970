"""Export after fine-tuning: settings that training does not change are those of the original weights, or named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from small_tokenizers import mixed_text, trained

from ezpz_llm.checkpoint import main
from ezpz_llm.training.data.tokenizer_files import copy_files
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.run import run


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fine-tune a tiny Llama in tmp_path/llama with a shorter context; return the run directory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))
    config = LlamaConfig(vocab_size=1024, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=[2, 5])
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    copy_files(trained("Prepend and Replace"), tmp_path / "llama")
    (tmp_path / "llama/generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [2, 5]}')
    (tmp_path / "text.txt").write_text(mixed_text(20_000))
    words = (f"--init-from {tmp_path}/llama --corpus {tmp_path}/text.txt --run-dir {tmp_path}/tuned --steps 1 "
             "--block-size 32 --micro-batch-size 1 --global-batch-size 1 --device cpu --ds-config ddp "
             "--precision fp32 --sample-tokens 0 --profile false --eval-tokens 32")
    assert run(parse(words.split())) == 0
    return tmp_path / "tuned"


def test_context_and_special_tokens_are_kept(tuned: Path, tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["export", str(tuned), str(tmp_path / "out")]) == 0
    assert ("note: max_position_embeddings stays 64, though the training had a context of 32\n"
            in capsys.readouterr().out)
    stored = json.loads((tmp_path / "out/config.json").read_text())
    assert (stored["max_position_embeddings"], stored["bos_token_id"], stored["eos_token_id"]) == (64, 1, [2, 5])
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text())["model_max_length"] == 64
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["temperature"] == 0.6
    shutil.rmtree(tmp_path / "llama")
    assert main(["export", str(tuned), str(tmp_path / "other")]) == 0
    assert "without generation_config.json: the weights that training began with are" in capsys.readouterr().out
