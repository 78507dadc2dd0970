"""Preparation of large corpora: kill and resume, full disks, parquet, streamed data sets."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hub_standin import COMMIT, hub
from msgspec import UNSET
from places import HELPERS
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.data.atomic_dir import JOURNAL
from ezpz_llm.training.data.corpora import find_corpus
from ezpz_llm.training.data.manifest import read_manifest, verify
from ezpz_llm.training.data.prepare import check_corpus, prepare
from ezpz_llm.training.data.reader import tasks
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.data.tokenize_corpus import encode_task
from ezpz_llm.training.data.tokenizers import get_tokenizer

# The command with a journal after each task of 16 kB, so that a small corpus has many save points. It stops when
# the journal has $HOLD_AT documents.
HASTY = [sys.executable, "-c", """
import functools, os, sys, time
from ezpz_llm.training.data import tokenize_corpus
from ezpz_llm.training.data.command import main
from ezpz_llm.core.base.errors import run_command
tokenize_corpus._SECONDS_BETWEEN_SAVES = 0.0
tokenize_corpus.tasks = functools.partial(tokenize_corpus.tasks, size=1 << 14)
save = tokenize_corpus._Work.save
def save_and_hold(work):
    save(work)
    if work.journal.documents >= int(os.environ.get("HOLD_AT", sys.maxsize)):
        time.sleep(600)
tokenize_corpus._Work.save = save_and_hold
sys.argv[0] = "python3 -m ezpz_llm.data"
raise SystemExit(run_command(main))
"""]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


def words(seed: int, count: int) -> str:
    chosen = random.Random(seed)
    return " ".join(chosen.choice(["one", "zwei", "trois\n", "四", "five "]) for _ in range(count))


def documents(count: int, seed: int = 1) -> list[str]:
    return [words(seed + number, number % 190) for number in range(count)]


def lines_of(texts: Sequence[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write_jsonl(path: Path, texts: Sequence[str]) -> None:
    path.write_bytes(lines_of(texts))


def write_parquet(path: Path, texts: Sequence[str | None], **options: object) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": list(texts)}), path, **options)


def tokens_of(texts: Sequence[str]) -> np.ndarray:
    return np.concatenate([[256, *text.encode()] for text in texts if text])


def all_tokens(folder: Path, first: str = "train", second: str = "val") -> np.ndarray:
    opened = TokenData.open(folder)
    return np.concatenate([opened.split(first)[:], opened.split(second)[:]])


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("[!.]*"))}


def start(command: Sequence[str], journal: Path, documents: int) -> subprocess.Popen:
    """Start HASTY, and return when its journal has at least `documents` documents.

    It stops 100 documents later, so that a fast machine does not complete it before a signal arrives.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "HOLD_AT": str(documents + 100)})
    deadline = time.monotonic() + scaled(60)
    while not (journal.is_file() and json.loads(journal.read_text())["documents"] >= documents):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return process


def partial(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial-{os.uname().nodename}")


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Folder with a text file, two jsonl files and another text file, with many tasks and documents."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.txt").write_text(words(3, 20_000))
    write_jsonl(folder / "b.jsonl", documents(400))
    write_jsonl(folder / "c.jsonl", documents(300, 1000))
    (folder / "d.txt").write_text(words(4, 9_000))
    return folder


def test_killed_at_every_operation(tmp_path: Path) -> None:
    """A SIGKILL before or after any file-system operation leaves the final shards bitwise identical."""
    source, folder = tmp_path / "source", tmp_path / "folder"
    source.mkdir()
    folder.mkdir()
    (source / "a.txt").write_text(words(3, 4000))
    (source / "b.jsonl.gz").write_bytes(gzip.compress(lines_of(documents(80))))
    script = HELPERS / "data_kills.py"
    process = subprocess.run([sys.executable, script, source, folder], capture_output=True, text=True,
                             timeout=scaled(120))
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["operations"] > 25
    assert [result for result in report["results"] if not result["same"]] == []
    assert report["left"] == ["often", "whole"]
    kept = [result["kept"] for result in report["results"][1:]]
    assert report["results"][0]["kills"] >= 1
    assert max(kept) == 80  # one text file and 79 non-empty lines
    assert sum(count > 0 for count in kept) > len(kept) / 2  # most kills lose only the work of one task


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_kill_with_workers_and_resume(mixed: Path, tmp_path: Path, how: signal.Signals) -> None:
    """Kill a pool of processes three times at random moments; then another node takes the work over."""
    whole = prepare(str(mixed), out=tmp_path / "whole", shard_tokens=50_000, progress=False)
    out = tmp_path / "out"
    command = [*HASTY, "prepare", str(mixed), "--out", str(out), "--shard-tokens", "50000", "--workers", "2"]
    for kept in (1, 150, 400):
        process = start(command, partial(out) / JOURNAL, kept)
        process.send_signal(how)
        stderr = process.communicate(timeout=scaled(60))[1]
        assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
        assert "Traceback" not in stderr
        assert not out.exists()
    assert "resuming after" in stderr
    hidden = out.with_name(f".{out.name}.partial-another-host")
    partial(out).rename(hidden)
    os.utime(hidden / JOURNAL, (time.time() - 3600,) * 2)
    result = subprocess.run(command, capture_output=True, text=True, timeout=scaled(120))
    assert result.returncode == 0, result.stderr
    assert "resuming after" in result.stderr
    assert shards(out) == shards(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mixed", "out", "whole"]


def test_work_in_progress_on_another_node_is_not_touched(mixed: Path, tmp_path: Path) -> None:
    hidden = tmp_path / ".out.partial-another-host"
    hidden.mkdir()
    (hidden / JOURNAL).write_text("{}")
    prepare(str(mixed), out=tmp_path / "out", progress=False)
    assert (hidden / JOURNAL).exists()


def test_work_that_cannot_be_resumed_is_restarted(mixed: Path, tmp_path: Path) -> None:
    """A journal of another request, an invalid journal, or missing tokens."""
    whole = prepare(str(mixed), out=tmp_path / "whole", progress=False)
    command = [*HASTY, "prepare", str(mixed), "--out", str(tmp_path / "out")]
    for spoil in ("request", "broken", "shorter", "missing"):
        hidden = partial(tmp_path / "out")
        process = start(command, hidden / JOURNAL, 100)
        process.kill()
        process.communicate(timeout=scaled(60))
        if spoil == "request":
            mixed.joinpath("a.txt").touch()  # a new time stamp counts as changed content
        elif spoil == "broken":
            (hidden / JOURNAL).write_text("{")
        elif spoil == "shorter":
            os.truncate(hidden / "train_000000.bin", 1000)
        else:
            (hidden / "train_000000.bin").unlink()
        process = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60))
        assert process.returncode == 0, process.stderr
        assert "resuming after" not in process.stderr
        actual, expected = shards(tmp_path / "out"), shards(whole)
        assert {name: actual[name] for name in actual if name.endswith(".bin")} == {
            name: expected[name] for name in expected if name.endswith(".bin")}
        shutil.rmtree(tmp_path / "out")


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """Mount a file system of 2 MB, or skip the test."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("no permission to mount a file system")
    yield place
    subprocess.run(["umount", place], check=True)


def test_full_disk_keeps_the_completed_part(mixed: Path, small_disk: Path, tmp_path: Path) -> None:
    with (mixed / "e.jsonl").open("w") as file:
        for text in documents(3000, 5000):
            file.write(json.dumps({"text": text}) + "\n")
    whole = prepare(str(mixed), out=tmp_path / "whole", shard_tokens=100_000, progress=False)
    assert sum(map(len, shards(whole).values())) > 3e6
    command = [*HASTY, "prepare", str(mixed), "--out", str(small_disk / "out"), "--shard-tokens", "100000"]
    for _ in range(2):
        process = subprocess.run(command, capture_output=True, text=True, timeout=scaled(120))
        assert process.returncode == 2
        assert "cannot write here: No space left on device; the completed part is kept" in process.stderr
        assert "free disk space, and run the same command again: it continues where it stopped" in process.stderr
        assert "Traceback" not in process.stderr
        assert not (small_disk / "out").exists()
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    process = subprocess.run(command, capture_output=True, text=True, timeout=scaled(120))
    assert process.returncode == 0, process.stderr
    assert "resuming after" in process.stderr
    assert shards(small_disk / "out") == shards(whole)


@pytest.mark.parametrize("size", [1, 700, 1 << 14])
def test_reading_can_resume_after_any_task(mixed: Path, size: int) -> None:
    """Resuming after any task loses and repeats nothing, and keeps line numbers correct."""
    (mixed / "a.txt").write_text(words(3, 300))
    write_jsonl(mixed / "b.jsonl", documents(40))
    write_jsonl(mixed / "c.jsonl", documents(30))
    (mixed / "d.txt").write_text("x" * 3000)  # nowhere to cut
    write_parquet(mixed / "e.parquet", documents(50), row_group_size=20)
    write_parquet(mixed / "f.parquet", documents(9), row_group_size=1)
    (mixed / "g.jsonl.gz").write_bytes(gzip.compress(lines_of(documents(20))) + gzip.compress(lines_of(["end"])))
    (mixed / "h.txt.gz").write_bytes(gzip.compress(words(5, 900).encode()))
    (mixed / "i.json").write_text(json.dumps([{"text": text} for text in documents(30)], indent=1))
    corpus, tokenizer = find_corpus(str(mixed)), get_tokenizer("bytes")
    read_tasks = list(tasks(corpus, size=size))
    assert sum(task.source_bytes for task in read_tasks) == corpus.size
    encoded = [encode_task(task, tokenizer) for task in read_tasks]
    whole = np.concatenate([part.tokens for part in encoded])
    expected = [words(3, 300), *documents(40), *documents(30), "x" * 3000, *documents(50), *documents(9),
                *documents(20), "end", words(5, 900), *documents(30)]
    np.testing.assert_array_equal(whole, tokens_of(expected))
    ends = np.cumsum([part.tokens.size for part in encoded])
    for number in range(0, len(read_tasks), max(1, len(read_tasks) // 30)):
        remaining = list(tasks(corpus, json.loads(json.dumps(read_tasks[number].after)), size))
        resumed = np.concatenate([np.empty(0, int), *(encode_task(task, tokenizer).tokens for task in remaining)])
        np.testing.assert_array_equal(resumed, whole[ends[number]:])
    lines = {(piece.path.name, piece.line) for task in read_tasks for piece in task.pieces
             if hasattr(piece, "line") and piece.is_jsonl}
    assert size > 700 or {line for name, line in lines if name == "b.jsonl"} >= {1, 40}


def test_parquet(tmp_path: Path) -> None:
    """Parquet files with row groups of any size give the same tokens as jsonl, for any number of processes."""
    texts = documents(1500)
    (tmp_path / "parquet").mkdir()
    for number, (first, rows) in enumerate([(0, 1), (400, 97), (800, 5000)]):
        part = texts[first:[400, 800, 1500][number]]
        write_parquet(tmp_path / "parquet" / f"{number:03d}.parquet", part, row_group_size=rows)
    write_jsonl(tmp_path / "all.jsonl", texts)
    prepared = [prepare(str(tmp_path / name), out=tmp_path / f"out{workers}-{name}", workers=workers,
                        val_fraction=0.02, progress=False)
                for name, workers in (("all.jsonl", 1), ("parquet", 1), ("parquet", 2))]
    facts = [read_manifest(folder) for folder in prepared]
    assert facts[0].splits == facts[1].splits == facts[2].splits
    assert facts[0].documents == facts[1].documents == sum(map(bool, texts))
    np.testing.assert_array_equal(all_tokens(prepared[1]), tokens_of(texts))
    assert facts[1].source.bytes == sum(path.stat().st_size for path in (tmp_path / "parquet").iterdir())


def test_invalid_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def check_rejected(content: bytes | None, message: str) -> None:
        if content is not None:
            (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(UserError) as caught:
            prepare(str(tmp_path / "a.parquet"), progress=False)
        assert message in str(caught.value)
        assert str(tmp_path / "a.parquet") in str(caught.value) or content is None

    write_parquet(tmp_path / "a.parquet", documents(300))
    whole = (tmp_path / "a.parquet").read_bytes()
    check_rejected(whole[:-100], "not a complete parquet file of UTF-8 text: ")
    check_rejected(b"some text", "not a complete parquet file of UTF-8 text: ")
    write_parquet(tmp_path / "a.parquet", ["one", None])
    check_rejected((tmp_path / "a.parquet").read_bytes(), 'row 1 has "text", but it is null')
    parquet.write_table(pyarrow.table({"content": ["a"], "n": [1]}), tmp_path / "a.parquet")
    check_rejected((tmp_path / "a.parquet").read_bytes(), 'no column "text" among content, n')
    parquet.write_table(pyarrow.table({"text": [1]}), tmp_path / "a.parquet")
    check_rejected((tmp_path / "a.parquet").read_bytes(), 'the column "text" has type int64, not string')
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    check_rejected(None, "pip install 'ezpz_llm[data]'")


def test_the_first_tokens_validate_as_in_build_nanogpt(tmp_path: Path) -> None:
    """Same shards as the published script: a full buffer is a shard, and shard 0 is for validation."""
    texts, size = documents(400), 7000
    expected, buffer = [], np.empty(0, int)
    for text in filter(None, texts):
        buffer = np.concatenate([buffer, [256, *text.encode()]])
        while len(buffer) >= size:
            expected.append(buffer[:size])
            buffer = buffer[size:]
    expected.append(buffer)
    write_jsonl(tmp_path / "a.jsonl", texts)
    folder = prepare(str(tmp_path / "a.jsonl"), out=tmp_path / "out", shard_tokens=size, val_tokens=size,
                     progress=False)
    names = ["val_000000.bin", *(f"train_{number:06d}.bin" for number in range(len(expected) - 1))]
    for name, tokens in zip(names, expected, strict=True):
        np.testing.assert_array_equal(np.fromfile(folder / name, "<u2"), tokens)
    assert verify(folder) == len(expected)
    facts = read_manifest(folder)
    assert (facts.val_tokens, facts.splits.val.tokens) == (size, size)
    assert facts.val_fraction is UNSET
    assert prepare(str(tmp_path / "a.jsonl"), out=folder, shard_tokens=size, val_tokens=size) == folder
    with pytest.raises(UserError, match="this folder contains other shards"):
        prepare(str(tmp_path / "a.jsonl"), out=folder, shard_tokens=size, val_tokens=size + 1)
    for choice, message in (({"val_tokens": -1}, "-1 validation tokens were requested"),
                            ({"val_tokens": 10**8}, "no tokens are left to train on: the corpus has"),
                            ({"val_tokens": 1, "val_fraction": 0.1}, "two validation splits")):
        with pytest.raises(UserError, match=message):
            prepare(str(tmp_path / "a.jsonl"), progress=False, **choice)


@pytest.mark.full
def test_a_data_set_of_the_hub(tmp_path: Path, cache: Path) -> None:
    """A local folder streamed with `datasets`, killed and resumed, gives the same tokens as without the kill."""
    pytest.importorskip("datasets")
    texts = documents(1200)
    folder = tmp_path / "fineweb"
    folder.mkdir()
    for number in range(3):
        write_parquet(folder / f"{number:03d}_00000.parquet", texts[number * 400:(number + 1) * 400],
                      row_group_size=150)
    corpus = find_corpus(f"hf:{folder}")
    tokenizer, expected = get_tokenizer("bytes"), tokens_of(texts)
    read_tasks = list(tasks(corpus, size=1 << 14))
    encoded = [encode_task(task, tokenizer) for task in read_tasks]
    np.testing.assert_array_equal(np.concatenate([part.tokens for part in encoded]), expected)
    ends = np.cumsum([part.tokens.size for part in encoded])
    for number in range(0, len(read_tasks), 6):
        position = json.loads(json.dumps(read_tasks[number].after))
        remaining = [encode_task(task, tokenizer).tokens for task in tasks(corpus, position, size=1 << 14)]
        np.testing.assert_array_equal(np.concatenate(remaining), expected[ends[number]:])
    out = tmp_path / "out"
    command = [*HASTY, "prepare", f"hf:{folder}", "--tokenizer", "bytes", "--out", str(out), "--val-tokens", "9000"]
    process = start(command, partial(out) / JOURNAL, 300)
    process.kill()
    process.communicate(timeout=scaled(60))
    process = subprocess.run(command, capture_output=True, text=True, timeout=scaled(120))
    assert process.returncode == 0, process.stderr
    assert "resuming after" in process.stderr
    np.testing.assert_array_equal(all_tokens(out, "val", "train"), expected)
    assert read_manifest(out).documents == sum(map(bool, texts))
    assert read_manifest(out).splits.val.tokens == 9000


@pytest.mark.full
def test_fineweb_edu_from_the_hub(tmp_path: Path, cache: Path) -> None:
    """A stand-in for the hub's server: the sample, its commit, an unavailable file, and resuming after it."""
    pytest.importorskip("datasets")
    texts, folder, withheld = documents(900), tmp_path / "repository", {"sample/10BT/002_00000.parquet"}
    (folder / "sample" / "10BT").mkdir(parents=True)
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: data/*\n"
                                      "- config_name: sample-10BT\n  data_files: sample/10BT/*\n---\n")
    for number in range(3):
        write_parquet(folder / "sample" / "10BT" / f"{number:03d}_00000.parquet",
                      texts[300 * number:300 * number + 300], row_group_size=100)
    (folder / "data").mkdir()
    write_parquet(folder / "data" / "000.parquet", ["not in the sample"])
    with hub(folder, withheld) as (address, requests):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "no_proxy": "127.0.0.1",
                        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
        command = [*HASTY, "prepare", "fineweb-edu", "--tokenizer", "bytes", "--val-tokens", "5000", "--download"]
        process = subprocess.run(command, capture_output=True, text=True, timeout=scaled(120), env=environment)
        assert process.returncode == 2, process.stderr
        assert "cannot read the data set" in process.stderr
        assert "Traceback" not in process.stderr
        withheld.clear()
        process = subprocess.run(command, capture_output=True, text=True, timeout=scaled(120), env=environment)
        assert process.returncode == 0, process.stderr
        assert "resuming after" in process.stderr
        assert not [line for line in requests if "/data/000.parquet" in line]
    out = Path(process.stdout.strip())
    assert out.name.startswith("fineweb-edu-sample-10BT-bytes-")
    np.testing.assert_array_equal(all_tokens(out, "val", "train"), tokens_of(texts))
    assert read_manifest(out).source.revision == COMMIT
    # A prepared data set needs neither the network nor --download.
    assert prepare("fineweb-edu", "bytes", val_tokens=5000) == out


def test_data_sets_are_downloaded_only_on_request(tmp_path: Path, cache: Path) -> None:
    for name in ("fineweb-edu", "hf:some/thing:part@v1"):
        with pytest.raises(UserError) as caught:
            check_corpus(name, "bytes")
        if "pip install 'ezpz_llm[data]'" in str(caught.value):
            pytest.skip("datasets is not installed")
        assert "is not prepared on this machine" in str(caught.value)
        assert f"python3 -m ezpz_llm.data prepare {name}" in str(caught.value)
        assert str(caught.value).endswith("--download")
        with pytest.raises(UserError, match="cannot read the data set"):  # HF_HUB_OFFLINE: no network is used
            prepare(name, "bytes", download=True, progress=False)
    with pytest.raises(UserError, match="is neither a data set nor a folder"):
        check_corpus("hf:what is this")
    with pytest.raises(UserError, match="did you mean fineweb-edu"):
        check_corpus("fineweb")
    assert list(cache.rglob("*.*")) == []
