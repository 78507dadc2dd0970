"""Preparation of token shards: content, rejected input, and atomicity."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from launch_runs import cpu_seconds
from places import ROOT
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.data.atomic_dir import JOURNAL
from ezpz_llm.training.data.corpora import find_corpus
from ezpz_llm.training.data.manifest import read_manifest, verify
from ezpz_llm.training.data.prepare import check_corpus, prepare
from ezpz_llm.training.data.reader import tasks, texts
from ezpz_llm.training.data.shards import ShardWriter, TokenData
from ezpz_llm.training.data.tokenize_corpus import entropy
from ezpz_llm.training.data.tokenizers import GPT2_FINGERPRINT

SHAKESPEARE_SHA = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
DATA = [sys.executable, "-m", "ezpz_llm.data"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def data(*arguments: object, code: int = 0, **kwargs: object) -> subprocess.CompletedProcess[str]:
    """Run `ezpz-llm data`; check its exit code, and that it prints no traceback."""
    run = subprocess.run([*DATA, *map(str, arguments)], capture_output=True, text=True, timeout=scaled(60),
                         **kwargs)
    assert "Traceback" not in run.stderr, run.stderr
    assert run.returncode == code, run.stderr
    return run


def file_at_hand(name: str) -> Path:
    """Return a file in $EZPZ_LLM_TEST_DATA or in shared/data beside the repository, or skip the test."""
    beside = ROOT.parent / "shared" / "data"
    for folder in filter(None, (os.environ.get("EZPZ_LLM_TEST_DATA"), beside)):
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    pytest.skip(f"no {name}: put it in a folder and set EZPZ_LLM_TEST_DATA to that folder")


def all_tokens(folder: Path) -> np.ndarray:
    opened = TokenData.open(folder)
    return np.concatenate([opened.split("train")[:], opened.split("val")[:]])


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Folder with a long document, short ones, an empty file, a hidden file, and a jsonl with two documents."""
    folder = tmp_path / "documents"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("long " * 2000)
    (folder / "b.txt").write_text("short <|endoftext|> naïve")
    (folder / "empty.txt").write_text("")
    (folder / ".hidden").write_bytes(b"\xff\xff")
    (folder / "sub" / "c.jsonl").write_text('{"text": "first"}\n\n{"id": 2, "text": "sec\\u00f6nd"}\n{"text": ""}')
    (folder / "z.txt").write_text("\r\nlast\n")
    return folder


EXPECTED = ["long " * 2000, "short <|endoftext|> naïve", "first", "secönd", "\r\nlast\n"]


def test_shards_hold_each_document_after_a_separator(documents: Path, tmp_path: Path) -> None:
    """Concatenated shards equal concatenated documents; a document is longer than a shard."""
    folder = prepare(str(documents), out=tmp_path / "out", shard_tokens=999, val_fraction=0.25, progress=False)
    expected = np.concatenate([[256, *text.encode()] for text in EXPECTED])
    np.testing.assert_array_equal(all_tokens(folder), expected)
    facts = read_manifest(folder)
    assert (facts.documents, facts.tokens, facts.vocab_size) == (5, len(expected), 257)
    train, val = facts.splits.train, facts.splits.val
    assert train.tokens == int(len(expected) * 0.75)
    assert [shard.tokens for shard in train.shards] == [999] * 7 + [train.tokens - 7 * 999]
    assert [shard.tokens for shard in val.shards] == [999, 999, val.tokens - 2 * 999]
    assert train.tokens + val.tokens == len(expected)
    first = (folder / "train_000000.bin").read_bytes()
    assert first[:8] == b"\x00\x01l\x00o\x00n\x00"  # little-endian uint16: 256, l, o, n
    assert hashlib.sha256(first).hexdigest() == train.shards[0].sha256
    assert verify(folder) == len(list(folder.glob("*.bin"))) == 11
    assert facts.unigram_entropy == pytest.approx(entropy(np.bincount(expected)))
    # The manifest determines the splits: other files, or similar names, are not splits.
    (folder / "eval_000000.bin").write_bytes(b"\x00" * 10)
    assert len(TokenData.open(folder).split("val")) == val.tokens
    with pytest.raises(UserError, match="did you mean val"):
        TokenData.open(folder).split("eval")


@given(lengths=st.lists(st.integers(0, 40), max_size=8), shard=st.integers(7, 30), keep=st.integers(0, 200))
@settings(max_examples=25, deadline=None)
def test_writing_loses_nothing(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], shard: int,
                               keep: int) -> None:
    folder = tmp_path_factory.mktemp("shards")
    stream = np.arange(sum(lengths), dtype="<u2")
    train, val = (ShardWriter(folder, name, stream.dtype, shard) for name in ("train", "val"))
    for part in np.split(stream, np.cumsum(lengths)[:-1]):
        train.write(part)
    train.copy_tail(keep, val)
    train.cut(keep)
    train.cut(keep)  # as after a kill during the first call
    entries = [writer.manifest_entry() for writer in (train, val)]
    assert [entry.tokens for entry in entries] == [min(keep, len(stream)), max(0, len(stream) - keep)]
    names = [file.file for entry in entries for file in entry.shards]
    assert sorted(names) == sorted(path.name for path in folder.iterdir())
    content = b"".join((folder / name).read_bytes() for name in names)
    assert content == stream.tobytes()


def test_many_processes_and_pieces_write_the_same_bytes(tmp_path: Path, documents: Path) -> None:
    """Two workers with several pieces per file write the same shards as one process."""
    (documents / "m.txt").write_text("Zwölf Boxkämpfer jagen\nViktor quer über den Sylter Deich. " * 150_000)
    with (documents / "n.jsonl").open("w") as file:
        for number in range(60_000):
            file.write(json.dumps({"text": f"document {number} " + "x" * (number % 97)}) + "\n")
    assert len(list(tasks(find_corpus(str(documents))))) > 2
    single = prepare(str(documents), out=tmp_path / "one", workers=1, progress=False)
    two = prepare(str(documents), out=tmp_path / "two", workers=2, progress=False)
    facts = [read_manifest(folder) for folder in (single, two)]
    assert facts[0].splits == facts[1].splits
    assert facts[0].unigram_entropy == facts[1].unigram_entropy
    assert facts[0].documents == 60_006
    np.testing.assert_array_equal(
        all_tokens(single)[:10_001], np.array([256, *("long " * 2000).encode()]))
    with (documents / "n.jsonl").open("a") as file:
        file.write('{"txt": 1}\n')
    with pytest.raises(UserError, match='line 60001 has no "text"'):  # an error in a worker process
        prepare(str(documents), out=tmp_path / "three", workers=2, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["documents", "one", "two"]


def test_pieces_of_any_size_join_to_the_text(tmp_path: Path) -> None:
    text = "naïve words\nand 中文 lines\n\n and   spaces\r\nend" * 7
    (tmp_path / "a.txt").write_bytes(text.encode())
    for size in (1, 3, 16, 64, 10_000):
        pieces = [piece for task in tasks(find_corpus(str(tmp_path)), size=size) for piece in task.pieces]
        entries = [entry for piece in pieces for entry in texts(piece)]
        assert "".join(text for _, text in entries) == text
        assert [begins for begins, _ in entries] == [True] + [False] * (len(entries) - 1)
        assert len(pieces) > 1 or size == 10_000


def test_stdlib_by_default(cache: Path) -> None:
    folder = Path(data("prepare", "stdlib").stdout.strip())
    assert folder.parent == cache / "shards"
    facts = read_manifest(folder)
    assert facts.source.python.endswith(".".join(map(str, sys.version_info[:3])))
    assert facts.unigram_entropy == pytest.approx(3.24, abs=0.08)  # the text differs by Python build
    assert facts.tokens == facts.source.bytes + facts.documents
    assert facts.splits.train.tokens == int(facts.tokens * 0.98)
    opened = TokenData.open(folder)
    assert opened.tokenizer.decode(opened.split("train")[:40]).startswith("<|endoftext|>")
    assert opened.split("train")[:].max() <= 256
    shown = data("show", folder).stdout
    assert f"{facts.tokens - int(facts.tokens * 0.98):,} tokens" in shown
    assert " against the manifest: " in data("verify", folder).stdout
    # The second call only returns the folder; `--check` writes nothing; a prepared folder is a corpus itself.
    stamp = (folder / "manifest.json").stat().st_mtime_ns
    again = data("prepare", "stdlib", "--check", "--world-size", 2)
    assert again.stdout == ""
    again = data("prepare", "stdlib")
    assert (again.stdout.strip(), again.stderr) == (str(folder), "")
    assert (folder / "manifest.json").stat().st_mtime_ns == stamp
    began = cpu_seconds()
    check_corpus("stdlib")
    assert cpu_seconds() - began < scaled(0.3)
    assert prepare(str(folder), "bytes") == folder
    with pytest.raises(UserError, match="already prepared"):
        prepare(str(folder), val_fraction=0.3)
    with pytest.raises(UserError, match="with the tokenizer bytes, not char"):
        check_corpus(str(folder), "char")


def test_shakespeare_by_characters(cache: Path) -> None:
    """The split of tiny Shakespeare is the same as in nanoGPT."""
    missing = data("prepare", "shakespeare", code=2).stderr
    assert "python3 -m ezpz_llm.data prepare shakespeare --file FILE (or --download)" in missing
    folder = Path(data("prepare", "shakespeare", "--file", file_at_hand("tinyshakespeare.txt")).stdout.strip())
    opened = TokenData.open(folder)
    assert opened.vocab_size == 65
    assert (len(opened.split("train")), len(opened.split("val"))) == (1_003_854, 111_540)
    text = (cache / "corpora" / "tinyshakespeare.txt").read_bytes()
    assert hashlib.sha256(text).hexdigest() == SHAKESPEARE_SHA
    assert opened.tokenizer.decode(all_tokens(folder)) == text.decode()


def test_other_file_is_not_shakespeare(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "other.txt").write_text("To be")
    error = data("prepare", "shakespeare", "--file", tmp_path / "other.txt", code=2).stderr
    assert f"this is not tiny Shakespeare: 5 bytes with sha256 {hashlib.sha256(b'To be').hexdigest()}" in error
    assert not cache.exists()
    error = data("prepare", "stdlib", "--file", tmp_path / "other.txt", code=2).stderr
    assert "only with shakespeare, not with stdlib" in error


@pytest.mark.parametrize(("name", "content", "message"), [
    ("empty.txt", b"", "nothing to read: the file is empty"),
    ("latin.txt", b"caf\xe9 au lait", "not UTF-8 text: byte 0xe9 at offset 3"),
    ("long.txt", b"word " * 1_000_000 + b"\xff", "byte 0xff at offset 5,000,000"),
    ("nothing.jsonl", b'\n{"text": ""}\n', "nothing to read: no document has any text"),
    ("cut.jsonl", b'{"text": "a"}\n{"text": "b', "line 2 is not JSON"),
    ("other.jsonl", b'{"text": "a"}\n\n{"txt": "b"}\n', 'line 3 has no "text"'),
    ("number.jsonl", b'{"text": 7}\n', 'line 1 has "text", but it is a number'),
    ("null.jsonl", b'{"text": "a"}\n{"text": null}\n', 'line 2 has "text", but it is null'),
    ("parts.jsonl", b'{"text": ["a"]}\n', 'line 1 has "text", but it is a list'),
    ("keys.jsonl", b'{"id": 1, "content": "a"}\n', 'line 1 has no "text", but "id", "content"'),
    ("null.json", b'[{"text": "a"}, {"text": null}]', 'item 1 has "text", but it is null'),
    ("list.jsonl", b'["text"]\n', 'line 1 has no "text"'),
])
@pytest.mark.parametrize("tokenizer", ["bytes", "char"])
def test_bad_corpora_are_rejected(tmp_path: Path, cache: Path, name: str, content: bytes, message: str,
                                 tokenizer: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        prepare(str(tmp_path / name), tokenizer, progress=False)
    assert message in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
    assert list(cache.rglob("*.*")) == []


def test_invalid_names_and_numbers(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.txt").write_text("text")
    for arguments, message in [
        (["shakespear"], "did you mean shakespeare"), ([tmp_path / "folde"], f"did you mean {tmp_path}/folder?"),
        ([tmp_path / "missing.txt"], "no such corpus file or folder"),
        ([tmp_path / "folder"], "the folder contains no non-empty files"),
        ([tmp_path / "a.txt", "--tokenizer", "byte"], "did you mean bytes"),
        ([tmp_path / "a.txt", "--val-fraction", "1"], "a validation fraction of 1.0"),
        ([tmp_path / "a.txt", "--shard-tokens", "0"], "the number of tokens per shard is 0"),
        ([tmp_path / "a.txt", "--workers", "0"], "the number of workers is 0"),
        ([tmp_path / "a.txt", "--tokenizer", "gpt2"], "is not on this machine"),
        ([tmp_path / "a.txt", "--out", tmp_path / "a.txt" / "out"], "cannot write here: File exists"),
        ([tmp_path / "a.txt", "--out", tmp_path], "this folder contains other files"),
    ]:
        assert message in data("prepare", *arguments, code=2).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "folder"]


def test_a_damaged_folder_is_named_with_the_command_that_mends_it(tmp_path: Path) -> None:
    (tmp_path / "a b.txt").write_text("some text " * 100)
    out = tmp_path / "out"
    data("prepare", tmp_path / "a b.txt", "--out", out)
    content = (out / "train_000000.bin").read_bytes()
    os.truncate(out / "train_000000.bin", 1001)
    again = ["prepare", tmp_path / "a b.txt", "--out", out]
    for arguments in (["verify", out], ["show", out], ["prepare", out], again):
        error = data(*arguments, code=2).stderr
        assert "train_000000.bin has 1,001 bytes; the manifest expects 1,800 bytes" in error
    command = error.split("create the folder again: ")[1].strip()
    repair = subprocess.run(["bash", "-c", command.replace("python3", sys.executable, 1)], timeout=scaled(60))
    assert repair.returncode == 0
    assert (out / "train_000000.bin").read_bytes() == content
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    os.truncate(copy / "train_000000.bin", 1001)
    assert data("show", copy, code=2).stderr.strip().endswith(f"--out '{copy}'" if " " in str(copy)
                                                              else f"--out {copy}")
    (out / "train_000000.bin").write_bytes(content[:-1] + b"\x07")
    assert "has sha256" in data("verify", out, code=2).stderr
    (out / "val_000000.bin").unlink()
    with pytest.raises(UserError, match=r"val_000000\.bin is missing"):
        TokenData.open(out)
    (out / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="this is not JSON"):
        TokenData.open(out)
    (out / "manifest.json").write_text('{"name": "a web app"}')
    with pytest.raises(UserError, match="is not a manifest of token shards"):
        prepare(str(out))


def test_manifest_of_another_tokenizer_is_rejected(tmp_path: Path) -> None:
    """The check needs no file, also for gpt2."""
    (tmp_path / "a.txt").write_text("some text " * 100)
    out = prepare(str(tmp_path / "a.txt"), out=tmp_path / "out", progress=False)
    whole = json.loads((out / "manifest.json").read_text())
    for name in ("bytes", "gpt2"):
        entry = {"name": name, "fingerprint": "0" * 64}
        (out / "manifest.json").write_text(json.dumps(whole | {"tokenizer": entry}))
        for check in (lambda: check_corpus(str(out)), lambda: prepare(str(out)),
                      lambda: prepare(str(tmp_path / "a.txt"), out=out)):
            with pytest.raises(UserError, match=f"another {name} tokenizer made .* is 0{{64}}") as caught:
                check()
            assert "prepare the corpus again" in str(caught.value)
    (out / "manifest.json").write_text(json.dumps(whole | {"tokenizer": {"name": "gpt2",
                                                                          "fingerprint": GPT2_FINGERPRINT}}))
    check_corpus(str(out), "gpt2")


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    source, out = tmp_path / "a.txt", tmp_path / "out"
    source.write_text("some text " * 100)
    out.mkdir()  # an empty folder may be used
    assert prepare(str(source), out=out, progress=False) == out
    assert prepare(str(source), out=out, progress=False) == out
    with pytest.raises(UserError, match="this folder contains other shards"):
        prepare(str(source), out=out, val_fraction=0.3, progress=False)
    os.utime(source, ns=(1, 1))
    with pytest.raises(UserError, match="the corpus files have changed"):
        prepare(str(source), out=out, progress=False)


def test_full_disk_before_the_first_save_leaves_no_files(tmp_path: Path) -> None:
    """A limit on the file size causes an OSError in the same call as a full disk."""
    (tmp_path / "a.txt").write_text("some text " * 100_000)
    error = data("prepare", tmp_path / "a.txt", "--out", tmp_path / "out", code=2,
                 preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))).stderr
    assert "cannot write here: File too large" in error
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_concurrent_processes_create_one_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words of text\n" * 300_000)
    argv = [*DATA, "prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]
    running = [subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    ended = [process.communicate(timeout=scaled(60)) for process in running]
    assert [process.returncode for process in running] == [0] * 4, ended
    assert {out.strip() for out, _ in ended} == {str(tmp_path / "out")}
    assert sum("prepared" in stderr for _, stderr in ended) == 1, ended  # the others waited, or started later
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "counts.npy", "manifest.json", "train_000000.bin", "val_000000.bin"]
    assert verify(tmp_path / "out") == 2


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_kill_during_preparation(tmp_path: Path, how: signal.Signals) -> None:
    """After a kill, no folder is visible, no worker is left, and a second run succeeds."""
    with (tmp_path / "a.txt").open("w") as file:
        for _ in range(40):
            file.write("some words of text\n" * 60_000)
    command = [*DATA, "prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--workers", "2"]
    marker = {**os.environ, "EZPZ_LLM_TEST_MARKER": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=marker)
    deadline = time.monotonic() + scaled(30)
    while not list(tmp_path.glob(".out.partial-*/train_*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(how)
    stderr = process.communicate(timeout=scaled(120))[1]
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in stderr
    assert not (tmp_path / "out").exists()
    while _processes_with(str(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    hidden = list(tmp_path.glob(".*"))
    if how == signal.SIGKILL:
        assert len(hidden) == 1
    else:
        assert all((folder / JOURNAL).exists() for folder in hidden)  # kept only if it can be resumed
    again = data(*command[3:])
    assert again.stdout.strip() == str(tmp_path / "out")
    assert verify(tmp_path / "out") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out"]


def _processes_with(value: str) -> list[int]:
    """Return the ids of processes with EZPZ_LLM_TEST_MARKER=value in their environment."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"EZPZ_LLM_TEST_MARKER={value}".encode() in environment:
            processes.append(int(folder.name))
    return processes


def test_help_is_fast_and_torch_free() -> None:
    began = cpu_seconds()
    assert "--val-fraction" in data("prepare", "--help").stdout
    assert cpu_seconds() - began < scaled(1)
    process = subprocess.run(
        [sys.executable, "-c", "import sys, ezpz_llm.training.data.prepare, ezpz_llm.training.data.samples;"
         "import ezpz_llm.training.data.command;"
         "print([name for name in ('torch', 'deepspeed', 'rich', 'pyarrow', 'datasets') if name in sys.modules])"],
        capture_output=True, text=True, timeout=scaled(60))
    assert process.stdout.strip() == "[]", process.stderr


def test_check_reports_a_cache_that_cannot_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").touch()
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "taken" / "cache"))
    with pytest.raises(UserError, match=r"cannot create .*: .*taken is not a folder"):
        check_corpus("stdlib")
