"""Format detection by content: JSON, gzip and zstd files are read, files without documents are rejected."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import socket
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.data import tokenize_corpus
from ezpz_llm.training.data.atomic_dir import InterruptedWriteError
from ezpz_llm.training.data.corpora import find_corpus
from ezpz_llm.training.data.formats import find_format
from ezpz_llm.training.data.manifest import read_manifest
from ezpz_llm.training.data.prepare import check_corpus, prepare
from ezpz_llm.training.data.reader import tasks
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.data.tokenize_corpus import encode_task
from ezpz_llm.training.data.tokenizers import CharTokenizer, get_tokenizer
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import check_run

TEXTS = ["one", "zwei\nzwei", "", "trois é", "四 " * 300]
BOM = b"\xef\xbb\xbf"
PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def lines(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({"id": 1, key: text}) + "\n" for text in texts).encode()


def tokens(*texts: str) -> list[int]:
    return [token for text in texts if text for token in (256, *text.encode())]


def tokens_of(path: Path) -> list[int]:
    """Return the tokens of a corpus of one file, read in tasks of a few documents."""
    encoded = [encode_task(task, get_tokenizer("bytes")) for task in tasks(find_corpus(str(path)), size=64)]
    assert sum(part.source_bytes for part in encoded) == path.stat().st_size
    return np.concatenate([part.tokens for part in encoded]).tolist()


def error_of(path: Path, content: bytes | None = None) -> str:
    """Return the error message for a file, which is the same in `check_corpus` and `prepare`."""
    if content is not None:
        path.write_bytes(content)
    messages = []
    for act in (check_corpus, lambda corpus: prepare(corpus, progress=False)):
        with pytest.raises(UserError) as caught:
            act(str(path))
        assert str(path) in str(caught.value)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    return messages[0]


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.ndjson", "a.json", "a.txt", "a", "a.json.gz",
                                  "a.jsonl.gz", "a.GZ", "plain-name-packed.jsonl"])
def test_json_lines_with_any_file_name(name: str, tmp_path: Path) -> None:
    content = lines(TEXTS)
    if "gz" in name.lower() or "packed" in name:
        content = gzip.compress(content[:50]) + gzip.compress(content[50:])  # two members, as written by bgzip
    (tmp_path / name).write_bytes(content)
    assert tokens_of(tmp_path / name) == tokens(*TEXTS)


def test_text_that_looks_like_json_is_read_as_text(tmp_path: Path) -> None:
    for content in ('{"a": 1, this is prose', "{ braces }\n", '{\n "text": "over several lines"\n}', "[1, 2]\n",
                    '{"a": 1}\nand then prose\n', "\n\n"):
        (tmp_path / "a.txt").write_text(content)
        assert tokens_of(tmp_path / "a.txt") == tokens(content)


def test_line_longer_than_the_head_of_a_file(tmp_path: Path) -> None:
    for packed in (bytes, gzip.compress):
        (tmp_path / "a.json").write_bytes(packed(lines(["x" * 200_000, "y"])))
        assert tokens_of(tmp_path / "a.json") == tokens("x" * 200_000, "y")


def test_endless_document_does_not_fill_memory(tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("formats", "reader"):
        monkeypatch.setattr(f"ezpz_llm.training.data.{module}.LONGEST_LINE", 1 << 20)
    for name, content, place in (("a.jsonl", b'{"text": "' + b"x" * (9 << 20), "a.jsonl:1"),
                                 ("a.txt", bytes(9 << 20), "a.txt, byte 0"),
                                 ("a.json", b'[{"text": "' + b"x" * (9 << 20), "a.json, item 0")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as caught:
            for _ in tasks(find_corpus(str(tmp_path / name)), size=1 << 18):
                pass
        assert place in str(caught.value)


@pytest.mark.parametrize("text", ['[{"text": "one"}, {"text": "two"}]',
                                  '[\n {"text": "one"},\n {"text": "two"}\n]\n'])
@pytest.mark.parametrize("packed", [False, True])
def test_an_array_in_a_jsonl_file_is_read_as_one(tmp_path: Path, text: str, packed: bool) -> None:
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    data = TokenData.open(prepare(str(path), "bytes", progress=False, val_fraction=0))
    assert data.tokenizer.decode(data.split("train")[:]) == "<|endoftext|>one<|endoftext|>two"
    path.write_bytes(b'[{"role": "user"}]\n[{"role": "user"}]\n')
    with pytest.raises(UserError, match='line 1 has no "text": it is a list'):
        prepare(str(path), "bytes", progress=False)


@pytest.mark.parametrize("packed", [bytes, gzip.compress])
def test_json_array_of_objects(tmp_path: Path, packed: object) -> None:
    """The array is longer than the read size, and so is one of its items."""
    texts = [*TEXTS, "x" * 700_000, *(f"document {number}" for number in range(30_000))]
    for indent in (None, 2):
        content = json.dumps([{"text": text} for text in texts], indent=indent, ensure_ascii=False)
        (tmp_path / "a.json").write_bytes(packed(BOM + content.encode()))
        parts = [encode_task(task, get_tokenizer("bytes")) for task in tasks(find_corpus(str(tmp_path / "a.json")),
                                                                             size=300_000)]
        assert len(parts) > 2
        assert np.concatenate([part.tokens for part in parts]).tolist() == tokens(*texts)
    for content, message in (('[{"text": "a"}, {"text": "b"', "not a complete JSON array in UTF-8"),
                             ('[{"text": "a"}, {text: "b"}]', "item 1"),
                             ('[{"text": "a"}] {}', "more text follows the JSON value"),
                             ('[{"text": "a"}, {"txt": "b"}]', 'item 1 has no "text"')):
        (tmp_path / "b.json").write_bytes(packed(content.encode()))
        with pytest.raises(UserError) as caught:
            prepare(str(tmp_path / "b.json"), progress=False)
        assert message in str(caught.value)


def test_zstd_requires_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl.zst"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zstandard", None)
        path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
        with pytest.raises(UserError) as caught:
            find_format(path)
        assert "pip install 'ezpz_llm[data]'" in str(caught.value)
    zstandard = pytest.importorskip("zstandard")
    packed = zstandard.compress(lines(TEXTS)) + zstandard.compress(lines(["end"]))
    path.write_bytes(packed)
    assert tokens_of(path) == tokens(*TEXTS, "end")
    assert "this zstd file is damaged: it is truncated" in error_of(path, packed[:-5])


def _archive(kind: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{kind}") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"), None)
    return buffer.getvalue()


def _zip(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, "")
    return buffer.getvalue()


IDS = np.random.default_rng(1).integers(0, 50_257, 4000).astype(np.uint16)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"
SIGNATURES = {
    "a.png": (PNG, "not UTF-8 text, probably binary: byte 0x89 at offset 0"),
    "a.gz": (gzip.compress(PNG), "not UTF-8 text"),
    "a.pdf.gz": (gzip.compress(b"%PDF-"), "PDF document, compressed"),
    "a.zip": (_zip("a.txt"), "a zip archive"), "a.tar": (_archive(""), "a tar archive"),
    "a.tar.gz": (_archive("gz"), "a tar archive, compressed with gzip"), "a.bz2": (bz2.compress(b"text"), "bzip2"),
    "a.xz": (lzma.compress(b"text"), "xz-compressed"), "a.pdf": (b"%PDF-1.7\n", "a PDF document"),
    "a.csv": (b"text,n\na,1\n", "a table (.csv)"), "a.TSV.gz": (gzip.compress(b"a\tb\n"), "a table (.tsv)"),
    "twice.gz": (gzip.compress(gzip.compress(b"text")), "compressed twice"), "a.npy": (b"\x93NUMPY\x01", "NumPy"),
    "a.pt": (b"\x80\x02\x8a", "a Python pickle"), "a.rtf": (b"{\\rtf1}", "an RTF document"),
    "a.json": (b'{\n "name": "x"\n}', "one JSON object over several lines"),
    "b.json": (b"[1, 2]", "neither lines"),
    "c.json": (b'"text"', "neither lines nor an array"),
    "a.parquet.gz": (gzip.compress(b"PAR1"), "parquet compressed with gzip"),
    "b.parquet": (LFS, "a Git LFS pointer"), "b.jsonl": (LFS, "a Git LFS pointer"), "b.txt": (LFS, "git lfs pull"),
    "x.bin": (struct.pack("<i", 20240520) + bytes(1020), "llm.c tokens (uint16), supported only in a"),
    "y.bin": (struct.pack("<i", 20240801) + bytes(1020), "llm.c tokens (uint32), supported only in a"),
    "lit.bin": (b"LITPKDS" + bytes(40), "lit-gpt"), "chunk-0-0.bin": (IDS.tobytes(), "litdata chunk (LitGPT)"),
    "part-0-00000.npy": (IDS.tobytes(), "raw tokens without a NumPy header, as written by OLMo"),
    "ids.bin": (IDS.tobytes(), "for nanoGPT's train.bin and val.bin, pass the folder"),
    "b.pt": (_zip("archive/data.pkl"), "PyTorch file (.pt)"), "b.npz": (_zip("arr_0.npy"), "NumPy arrays (.npz)"),
    "a.arrow": (b"ARROW1\0\0", "an Arrow file"), "data.arrow": (b"\xff\xff\xff\xff\x10\0\0\0", "save_to_disk"),
    "a.mds": (IDS.tobytes(), "MosaicML"), "a.ds": (IDS.tobytes(), "datatrove"),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_other_formats_are_rejected_with_their_name(name: str, tmp_path: Path) -> None:
    content, description = SIGNATURES[name]
    error = error_of(tmp_path / name, content)
    assert description in error
    assert "iconv" not in error
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a.txt").write_text("good text")
    (tmp_path / name).rename(tmp_path / "folder" / name)
    with pytest.raises(UserError) as caught:  # also in a folder
        check_corpus(str(tmp_path / "folder"))
    assert description in str(caught.value)


def test_only_text_gets_advice_to_convert_its_encoding(tmp_path: Path) -> None:
    for name, content, advice in (("latin.txt", "café au lait".encode("latin-1"), "iconv -f LATIN1 -t UTF-8"),
                                  ("utf16.txt", "text".encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
                                  ("binary", bytes(range(256)) * 9, None)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as caught:
            prepare(str(tmp_path / name), progress=False)
        assert "not UTF-8" in str(caught.value)
        assert advice is None or advice in str(caught.value)
        assert ("iconv" in str(caught.value)) == (advice is not None)


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(lines([os.urandom(3000).hex() for _ in range(200)]))
    for content in (whole[:-9], whole[:5000] + bytes(50) + whole[5050:]):
        (tmp_path / "a.jsonl.gz").write_bytes(content)
        with pytest.raises(UserError, match="this gzip file is damaged: "):
            prepare(str(tmp_path / "a.jsonl.gz"), progress=False)
    assert list(tmp_path.glob("cache/shards/.*")) == []


def test_byte_order_marks_are_dropped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_bytes(BOM + "eins \ufeff".encode())
    (folder / "b.jsonl").write_bytes(BOM + lines(["zwei"]))
    (folder / "c.txt.gz").write_bytes(gzip.compress(BOM + b"drei"))
    (folder / "d.txt").write_bytes(BOM)
    shards = prepare(str(folder), val_fraction=0.0)
    assert TokenData.open(shards).split("train")[:].tolist() == tokens("eins \ufeff", "zwei", "drei")
    assert read_manifest(shards).source.byte_order_marks == 4
    assert "dropped 4 byte-order marks at the start of files" in capsys.readouterr().err


def test_uncommon_json_lines(tmp_path: Path) -> None:
    """Lines that only Python's parser accepts, and their errors."""
    content = ['{"text": "a\\ud800b"}', "\u00a0", '{"text": "c", "score": NaN}', '{"text": "\\ud83d\\ude00"}',
               '{"text": "d", "score": 1e999}', '{"text": "x", "text": "e"}', '{"tags": [["["]], "text": "f"}']
    (tmp_path / "a.jsonl").write_text("\n".join(content))
    assert tokens_of(tmp_path / "a.jsonl") == tokens("a\ufffdb", "c", "\N{GRINNING FACE}", "d", "e", "f")
    for line, message in (('{"text": "a", "tags": ' + 101 * "[" + 101 * "]" + "}", "nested more than 100"),
                          ("\ufeff" + '{"text": "a"}', "Expecting value"), ('{"text": "a"} b', "Extra data")):
        (tmp_path / "b.jsonl").write_text('{"text": "a"}\n' + line)
        with pytest.raises(UserError, match=f"line 2 is not JSON: .*{message}"):
            tokens_of(tmp_path / "b.jsonl")


def test_special_files_are_skipped_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(folder)  # the path of a Unix socket has at most 107 characters
        server.bind("socket")
        shards = prepare(str(folder), val_fraction=0.0)
    assert TokenData.open(shards).split("train")[:].tolist() == tokens("text")
    notes = capsys.readouterr().err
    assert f"{folder / 'pipe'} (a FIFO)" in notes
    assert f"{folder / 'socket'} (a socket)" in notes
    assert "the corpus is a FIFO, which can be read only once" in error_of(folder / "pipe")


def test_text_key(tmp_path: Path) -> None:
    """--text-key works for JSON lines, arrays and parquet, and is part of the shards' identity."""
    (tmp_path / "a.jsonl").write_bytes(lines(["one", "two"], "content"))
    with pytest.raises(UserError) as caught:
        prepare(str(tmp_path / "a.jsonl"), progress=False)
    assert 'line 1 has no "text"' in str(caught.value)
    assert "--text-key NAME" in str(caught.value)
    shards = prepare(str(tmp_path / "a.jsonl"), text_key="content", val_fraction=0.0, progress=False)
    assert TokenData.open(shards).split("train")[:].tolist() == tokens("one", "two")
    facts = read_manifest(shards)
    assert facts.source.text_key == "content"
    assert "--text-key content" in facts.command
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "x", "b": "y"}\n')
    assert len({prepare(str(tmp_path / "a.jsonl"), text_key=key, progress=False) for key in "ab"}) == 2
    (tmp_path / "b.json").write_text('[{"a": "x"}]')
    mixed = f"{tmp_path / 'a.jsonl'}=1,{tmp_path / 'b.json'}=1,{shards}=1"
    assert len(TokenData.open(prepare(mixed, text_key="a", progress=False)).parts) == 3
    with pytest.raises(UserError, match="already prepared"):
        check_corpus(str(shards), text_key="a")
    # The trainer has the option too. Only with it does it find the prepared shards, which have too few tokens.
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "' + b"x" * 99 + b'", "b": "y"}\n')
    prepare(str(tmp_path / "a.jsonl"), text_key="a", progress=False)
    arguments = ["--corpus", str(tmp_path / "a.jsonl"), "--global-batch-size", "4"]
    assert check_run(parse([*arguments, "--text-key", "b"]), 1).config.text_key == "b"
    with pytest.raises(UserError, match="90 tokens are too few"):
        check_run(parse([*arguments, "--text-key", "a"]), 1)
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"content": ["p"], "text": [1]}), tmp_path / "c.parquet")
    shards = prepare(str(tmp_path / "c.parquet"), text_key="content", val_fraction=0.0, progress=False)
    assert TokenData.open(shards).split("train")[:].tolist() == tokens("p")


def _broken_folder(folder: Path) -> Path:
    """Create a folder with valid documents and five broken ones of different kinds."""
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(["one"]) + b'{"txt": 1}\n{"text": "cut\n\xff{}\n' + lines(["two"]))
    (folder / "b.txt").write_bytes(b"x" * 5_000_000 + b" \xff " + b"y" * 5_000_000)
    (folder / "c.json").write_text('[{"text": "three"}, {"text": null}]')
    (folder / "d.txt").write_text("four")
    return folder


@pytest.mark.parametrize("workers", [1, 2])
def test_broken_documents_are_skipped_and_counted_up_to_a_limit(tmp_path: Path, workers: int,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    folder = _broken_folder(tmp_path / "folder")
    with pytest.raises(UserError, match='line 2 has no "text"') as caught:  # the default: the first one is an error
        prepare(str(folder), workers=workers, progress=False)
    assert "--max-broken N" in caught.value.instead
    with pytest.raises(InterruptedWriteError,
                       match="one broken document more than --max-broken 4 allows") as caught:
        prepare(str(folder), workers=workers, max_broken=4, progress=False)
    assert "--max-broken 40" in caught.value.instead
    shards = prepare(str(folder), workers=workers, max_broken=5, val_fraction=0.0)
    assert TokenData.open(shards).split("train")[:].tolist() == tokens("one", "two", "three", "four")
    broken = read_manifest(shards).source.broken
    assert broken.documents == 5
    for place, error in zip(("a.jsonl:2: ", "a.jsonl:3: ", "a.jsonl:4: ", "b.txt: ", "c.json: "), broken.first,
                            strict=True):
        assert error.startswith(str(folder / place))
    assert "offset 5,000,001" in broken.first[3]
    assert "skipped 5 broken documents" in capsys.readouterr().err
    # Existing shards are used without --max-broken.
    assert prepare(str(folder), val_fraction=0.0, progress=False) == shards
    chars = prepare(str(folder), "char", max_broken=5, progress=False)
    tokenizer = TokenData.open(chars).tokenizer
    assert isinstance(tokenizer, CharTokenizer)
    assert set(tokenizer.characters) == set("onetwothreefour")


def test_counts_of_broken_documents_survive_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preparation that stops and resumes gives the same manifest as one without interruption."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(
        lines([f"document {number} " * 40]) + b"broken\n" * (number % 10 == 0) for number in range(300))))
    whole = prepare(str(folder), out=tmp_path / "whole", max_broken=99, progress=False)
    monkeypatch.setattr(tokenize_corpus, "_SECONDS_BETWEEN_SAVES", 0.0)
    monkeypatch.setattr(tokenize_corpus, "tasks", lambda *args, **kwargs: tasks(*args, size=1 << 13, **kwargs))
    with pytest.raises(InterruptedWriteError, match="one broken document more than --max-broken 17 allows"):
        prepare(str(folder), out=tmp_path / "out", max_broken=17, progress=False)
    messages = []
    monkeypatch.setattr(tokenize_corpus, "print_to_stderr", messages.append)
    prepare(str(folder), out=tmp_path / "out", max_broken=99)
    assert any("resuming after" in line for line in messages)
    facts = [read_manifest(shards) for shards in (whole, tmp_path / "out")]
    assert facts[0].source.broken.documents == 30
    for name in ("source", "splits", "documents"):
        assert getattr(facts[0], name) == getattr(facts[1], name)


@pytest.mark.full
def test_names_too_long_for_a_path_are_user_errors(tmp_path: Path) -> None:
    """Names of a corpus, a mixture and a tokenizer; a long name of an existing file works."""
    long = "x" * 320
    for arguments in ([f"{long}=1"], [f"{long}=0.7,{long}2=0.3"], [f"/{long}"], ["stdlib", "--tokenizer", long]):
        process = subprocess.run([sys.executable, "-m", "ezpz_llm.data", "prepare", *arguments], cwd=tmp_path,
                                 capture_output=True, text=True, timeout=scaled(60))
        assert (process.returncode, process.stdout) == (2, ""), process.stderr
        assert "Traceback" not in process.stderr
        assert process.stderr.startswith(("error: unknown corpus", "error: no such corpus", "error: unknown tok"))
    (tmp_path / ("y" * 250)).write_text("text " * 50)
    assert prepare(str(tmp_path / ("y" * 250)), progress=False).is_dir()
