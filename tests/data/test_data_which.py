"""`ezpz-llm data which`: a step's documents compared with a scan of all tokens, and error messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launch_runs import clean_env
from megatron_files import write_megatron
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.data.command import main
from ezpz_llm.training.data.document_lookup import find_extracts
from ezpz_llm.training.data.prepare import prepare
from ezpz_llm.training.data.samples import Batches
from ezpz_llm.training.data.shards import TokenData

T, SEED = 24, 5


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path / "cache"))


def texts(count: int) -> list[str]:
    draw = np.random.default_rng(2)
    return [f"{number} " + "".join(map(chr, draw.integers(97, 123, draw.integers(1, 70))))
            for number in range(count)]


def our_shards(folder: Path, documents: list[str], **options: int) -> TokenData:
    lines = folder / "mine.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return TokenData.open(prepare(str(lines), "bytes", shard_tokens=1000, progress=False, **options))


def megatron(folder: Path, documents: list[str], name: str = "theirs") -> TokenData:
    prefix = write_megatron(folder / name, [np.frombuffer(text.encode(), np.uint8) for text in documents], "uint16")
    return TokenData.open(prepare(str(prefix), "bytes", progress=False))


def check(data: TokenData, owners: list[int], documents: list[str]) -> None:
    """Compare the extracts of 1,000 random samples with a scan of the split.

    Args:
        owners: index of the document of each token in the split.
    """
    numbers = sorted(np.random.default_rng(3).choice(10**6, 1000, replace=False).tolist())
    by_sample: dict[int, list] = {number: [] for number in numbers}
    for extract in find_extracts(data, T, SEED, numbers):
        by_sample[extract.sample].append(extract)
    files = {name: np.fromfile(name, np.uint16) for name in {e.file for es in by_sample.values() for e in es}}
    batches = Batches(data.split("train"), block_size=T, seed=SEED, global_batch=1, micro_batch=1, dp_rank=0,
                      dp_size=1)
    stream = data.split("train")[:]  # type: ignore[index]
    positions = {stream[at:at + T + 1].tobytes(): at for at in range(len(stream) - T)}
    for number in numbers:
        (tokens, targets), = batches.micro_batches(number)
        window = np.append(tokens[0], targets[0, -1])
        pieces = by_sample[number]
        assert np.concatenate([files[e.file][e.first:e.stop] for e in pieces]).tolist() == window.tolist()
        at = positions[window.astype(stream.dtype).tobytes()]
        assert [e.document for e in pieces for _ in range(e.first, e.stop)] == owners[at:at + T + 1]
        for e in pieces:
            assert e.text == documents[e.document][:48].strip()


def test_our_shards_by_end_of_text_tokens(tmp_path: Path) -> None:
    documents = texts(800)
    data = our_shards(tmp_path, documents)
    owners = [number for number, text in enumerate(documents) for _ in range(len(text) + 1)]
    assert len(data.manifest.splits.train.shards) > 10
    check(data, owners[:len(data.split("train"))], [text[:47] for text in documents])


def test_split_that_starts_within_a_document(tmp_path: Path) -> None:
    documents = texts(800)
    data = our_shards(tmp_path, documents, val_tokens=1010)
    owners = [number for number, text in enumerate(documents) for _ in range(len(text) + 1)][1010:]
    remaining = "".join("\0" + text for text in documents)[1010:].split("\0")
    check(data, [number - owners[0] for number in owners], [remaining[0], *(text[:47] for text in remaining[1:])])


def test_megatron_documents_by_the_index(tmp_path: Path) -> None:
    documents = texts(800)
    data = megatron(tmp_path, documents)
    owners = [number for number, text in enumerate(documents) for _ in text]
    check(data, owners[:len(data.split("train"))], documents)


def test_a_mixture_names_the_corpus(tmp_path: Path) -> None:
    parts = {}
    for name, word in (("a", "alpha"), ("b", "beta")):
        (tmp_path / name).mkdir()
        parts[name] = megatron(tmp_path / name, [f"{word} {text}" for text in texts(300)], name)
    folder = prepare(f"{tmp_path / 'a' / 'a'}=0.75,{tmp_path / 'b' / 'b'}=0.25", "bytes", progress=False)
    parts_read = find_extracts(TokenData.open(folder), T, SEED, range(4096))
    names = {extract.sample: extract.corpus for extract in parts_read}
    assert sum("b.idx" in name for name in names.values()) == 1024
    assert all(extract.text.startswith("beta" if "b.idx" in extract.corpus else "alpha") for extract in parts_read)


def run_of(folder: Path, data: TokenData, sizes: list[int], first: int = 1, **record: object) -> Path:
    run = folder / "run"
    run.mkdir(exist_ok=True)
    lines = [{"step": first + i, "tokens_per_second": size * T / 0.37, "step_time_s": 0.37}
             for i, size in enumerate(sizes)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "run.json").write_text(json.dumps({
        "data": {"folder": str(data.folder), "fingerprint": data.fingerprint},
        "config": {"seed": SEED, "corpus": "mine", "overfit_one_batch": False, "resume": None},
        "model": {"block_size": T}, **record}))
    return run


def which(capsys: pytest.CaptureFixture[str], run: Path, step: int) -> dict:
    main(["which", str(run), "--step", str(step), "--json"])
    return json.loads(capsys.readouterr().out)


def test_position_follows_the_runs_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = our_shards(tmp_path, texts(800))
    # Resumed after step 2 with twice the batch.
    run = run_of(tmp_path, data, [4, 4, 8, 8], steps=4, samples_consumed=24)
    step = which(capsys, run, 3)
    assert (step["first"], step["stop"]) == (8, 16)
    assert {extract["sample"] for extract in step["extracts"]} == set(range(8, 16))
    assert [e.document for e in find_extracts(data, T, SEED,
                                              range(8, 16))] == [e["document"] for e in step["extracts"]]
    # Rollbacks from step 5 to 2 and from step 4 to 2 skip the samples in between.
    back = [{"from_step": 5, "to_step": 2, "samples_passed_over": 12},
            {"from_step": 4, "to_step": 2, "samples_passed_over": 20}]
    run = run_of(tmp_path, data, [4, 4, 4], rollbacks=back)
    assert [which(capsys, run, step)["first"] for step in (2, 3)] == [4, 28]
    # A run that continues another directory's run: its final record determines its first sample.
    run = run_of(tmp_path, data, [8, 8], first=11, steps=12, samples_consumed=56)
    assert [which(capsys, run, step)["first"] for step in (11, 12)] == [40, 48]


@pytest.mark.full
def test_records_of_the_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps of 4 samples, then two steps of 8 in the same run directory."""
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(400)))
    run = tmp_path / "run"
    for options in (("--steps", "2", "--global-batch-size", "4"),
                    ("--steps", "4", "--global-batch-size", "8", "--resume", str(run))):
        process = subprocess.run(
            [sys.executable, "-m", "ezpz_llm.train", "--model", "tiny-gpt2", "--n-layer", "1", "--block-size", "24",
             "--corpus", str(tmp_path / "mine.jsonl"), "--ds-config", "ddp", "--precision", "fp32", "--device",
             "cpu", "--eval-tokens", "64", "--sample-tokens", "0", "--profile", "false", "--run-dir", str(run),
             *options], env=clean_env(OMP_NUM_THREADS="1", EZPZ_LLM_CACHE=str(tmp_path / "cache")),
            capture_output=True, text=True, timeout=scaled(200), check=False)
        assert process.returncode == 0, process.stdout + process.stderr
    reads = [which(capsys, run, step) for step in (1, 2, 3, 4)]
    assert [(step["first"], step["stop"]) for step in reads] == [(0, 4), (4, 8), (8, 16), (16, 24)]
    assert all(extract["corpus"] == str(tmp_path / "mine.jsonl") for step in reads for extract in step["extracts"])


def test_lines_are_safe_for_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = our_shards(tmp_path, ["\x1b]0;title\x07 words " * 4] * 300)
    main(["which", str(run_of(tmp_path, data, [2])), "--step", "1"])
    table = capsys.readouterr().out
    assert table.startswith("step 1: samples 0 to 1\n")
    assert str(tmp_path / "mine.jsonl") in table
    assert "words" in table
    assert "\x1b" not in table
    assert "\x07" not in table


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = our_shards(tmp_path, texts(300))

    def check_rejected(run: Path, step: int, message: str) -> None:
        with pytest.raises(UserError, match=message) as raised:
            main(["which", str(run), "--step", str(step)])
        assert raised.value.where
        assert raised.value.instead

    check_rejected(tmp_path / "nowhere", 1, "run directory does not exist")
    (tmp_path / "empty").mkdir()
    check_rejected(tmp_path / "empty", 1, "did not record its data")
    run = run_of(tmp_path, data, [4, 4])
    check_rejected(run, 3, "no step 3")
    check_rejected(run, 0, "no step 0")
    check_rejected(run_of(tmp_path, data, [8], first=11), 11, "continues another run")
    state = run_of(tmp_path, data, [8], first=11) / "checkpoints/step-00000012/state.json"
    state.parent.mkdir(parents=True)
    state.write_text('{"step": 12}')
    with pytest.raises(UserError, match="consumed is missing"):
        main(["which", str(tmp_path / "run"), "--step", "11"])
    state.unlink()
    check_rejected(run_of(tmp_path, data, [4, 4], steps=2, samples_consumed=16), 1, "the block size changed")
    run = run_of(tmp_path, data, [4])
    record = json.loads((run / "run.json").read_text())
    record["data"]["fingerprint"] = "of other tokens"
    (run / "run.json").write_text(json.dumps(record))
    check_rejected(run, 1, "have changed since the run read them")
    run = run_of(tmp_path, data, [4])
    (data.folder / "train_000003.bin").unlink()
    check_rejected(run, 1, "train_000003.bin is missing")
    (data.folder / "manifest.json").unlink()
    check_rejected(run, 1, "no manifest.json")
