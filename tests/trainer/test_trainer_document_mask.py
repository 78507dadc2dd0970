"""--mask-documents in whole runs: training, validation, evaluation in another layout, and resuming."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import check_run

SHAPE = ["--model", "tiny-llama", "--n-layer", "2", "--n-embd", "64", "--block-size", "64", "--precision", "fp32",
         "--device", "cpu"]


def write_corpus(folder: Path) -> Path:
    """Write many documents that are shorter than a window, and start with a number that determines the rest."""
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number % 7}: {'abcdefg'[number % 7] * (number % 11)}"}) + "\n"
                            for number in range(4000)))
    return path


def run(module: str, *words: str, ranks: int = 1) -> str:
    command = [sys.executable, "-m", "ezpz_llm.launch", "-n", str(ranks),
               sys.executable, "-m", f"ezpz_llm.{module}", *words]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
                          text=True, timeout=scaled(240), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_corpus_without_end_of_text_is_rejected_before_the_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))
    words = [*SHAPE, "--corpus", str(write_corpus(tmp_path)), "--mask-documents", "true"]
    check_run(parse(words), 1)
    with pytest.raises(UserError, match="--mask-documents needs an end-of-text token") as caught:
        check_run(parse([*words, "--tokenizer", "char"]), 1)
    assert caught.value.instead == ("use another tokenizer, such as --tokenizer bytes, or train with "
                                    "--mask-documents false")


@pytest.mark.full
def test_validation_and_evaluation_use_the_mask_of_training(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    settings = [*SHAPE, "--corpus", str(write_corpus(tmp_path)), "--eval-tokens", "0", "--sample-tokens", "0",
                "--lr", "0.01", "--verbose"]
    run_dir = RunDir(tmp_path / "masked")
    printed = run("train", *settings, "--ds-config", "pp2", "--mask-documents", "true", "--steps", "30",
                  "--run-dir", str(run_dir.path), ranks=2)
    assert "flash_attention, with masks between documents" in printed
    trained = read_record(run_dir)
    assert trained.settings.mask_documents

    def evaluated() -> float:
        """Return the validation loss in one process."""
        result = RunDir(tmp_path / "evaluation")
        run("evaluate", "val", str(run_dir.path), "--precision", "fp32", "--device", "cpu", "--run-dir",
            str(result.path))
        return read_record(result).evaluation["val"]["val_loss"]

    assert evaluated() == pytest.approx(trained.val_loss, abs=1e-5)  # the bound of test_pipeline.py
    record = json.loads(run_dir.record.read_text())
    record["config"]["mask_documents"] = False
    run_dir.record.write_text(json.dumps(record))
    assert abs(evaluated() - trained.val_loss) > 1e-3
    record["config"]["mask_documents"] = True
    run_dir.record.write_text(json.dumps(record))

    resume = ("train", "--resume", str(run_dir.path), "--run-dir", str(run_dir.path), "--ds-config", "ddp",
              "--decay-steps", "30")
    assert "different settings" not in run(*resume, "--steps", "31")
    assert [line["step"] for line in read_lines(run_dir.metrics)][-1] == 31
    assert read_record(run_dir).settings.mask_documents
    changed = run(*resume, "--steps", "32", "--mask-documents", "false")
    assert "mask_documents was True and is False" in changed
    assert not read_record(run_dir).settings.mask_documents
