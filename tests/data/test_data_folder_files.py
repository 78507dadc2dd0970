"""Folders with other files than training text: splits, copies, backups and documentation."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ezpz_llm.training.data.folder_files import find_splits, odd_files
from ezpz_llm.training.data.prepare import prepare
from ezpz_llm.training.data.shards import TokenData


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))


FOLDER = ("a.jsonl", "a.jsonl.gz", "a.jsonl~", "README.md", "LICENSE", "train-00000-of-00002.jsonl",
          "train-00001-of-00002.jsonl", "validation-00000-of-00001.jsonl", "test.jsonl")


def write_folder(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"text": f"text of {name}"}) + "\n" if ".json" in name else f"text of {name}"
        (folder / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())


def test_files_that_may_not_be_training_text_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "corpus", FOLDER)
    data = TokenData.open(prepare(str(tmp_path / "corpus"), "bytes"))
    err = capsys.readouterr().err
    assert "note: skipping the test split: test.jsonl\n" in err
    assert "note: the validation split is: validation-00000-of-00001.jsonl\n" in err
    assert ("LICENSE (documentation), README.md (documentation), a.jsonl.gz (a copy of a.jsonl?), "
            "a.jsonl~ (a backup)\n") in err
    val, train = (data.tokenizer.decode(data.split(split)[:]) for split in ("val", "train"))
    assert val == "<|endoftext|>text of validation-00000-of-00001.jsonl"
    assert "text of train-00001" in train
    assert "text of test" not in train + val
    assert "validation" not in train
    # With an explicit fraction, the split comes from the end of the stream, as usual.
    other = TokenData.open(prepare(str(tmp_path / "corpus"), "bytes", val_fraction=0.1, progress=False))
    assert 0 < len(other.split("val")) < len(data.split("val"))


@pytest.mark.parametrize(("names", "splits"), [
    (["wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"], ["train", "validation", "test"]),
    (["train/0.txt", "dev/0.txt", "other.txt"], ["train", "validation", None]),
    (["data/train-0.parquet", "data/validation-0.parquet"], ["train", "validation"]),
    (["owt_train_000.jsonl.gz", "owt_val_000.jsonl.gz"], ["train", "validation"]),
    (["train.py", "val.py", "tests/test_a.py"], [None] * 3),  # a program
    (["val.txt", "test.txt"], [None] * 2),  # nothing would be left to train on
    (["data/train/0.jsonl", "data/valid/0.jsonl", "data/test/0.jsonl"], ["train", "validation", "test"]),
    (["train.jsonl", "eval.jsonl"], ["train", "test"]),
    (["testimony.txt", "training.txt", "devotion.txt"], [None, "train", None]),
])
def test_splits_are_found_by_name(names: list[str], splits: list[str | None]) -> None:
    assert [find_splits(names).get(name) for name in names] == splits


def test_files_that_only_differ_in_suffixes_may_be_copies() -> None:
    assert list(odd_files(["a.jsonl", "a.jsonl.GZ", "a.parquet", "b.py", "b.txt"])) == [
        "a.jsonl.GZ (a copy of a.jsonl?)", "a.parquet (a copy of a.jsonl?)"]


def test_links_to_folders_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path, ("corpus/a.txt", "other/b.txt"))
    (tmp_path / "corpus/link").symlink_to(tmp_path / "other")
    prepare(str(tmp_path / "corpus"), "bytes")
    assert f"note: skipping {tmp_path}/corpus/link (a link to a folder)" in capsys.readouterr().err
