"""Resuming under other layouts, numbers of ranks and batches: same losses, same samples."""

from __future__ import annotations

import datetime
import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import Server
from places import ROOT

from ezpz_llm import train
from ezpz_llm.core.rundir import RunDir, write_json
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.training.checkpoint.manifest import STATE, complete_checkpoints, read_json
from ezpz_llm.training.checkpoint.retention import find
from ezpz_llm.training.data.prepare import prepare
from ezpz_llm.training.data.samples import Batches
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.layout.ops import is_built
from ezpz_llm.training.trainer.run_data import Position, hash_samples

RESULT = ROOT / "benchmarks" / "results" / "resume_matrix.json"
BLOCK = 32
RUN = ["--n-layer", "4", "--n-head", "4", "--n-kv-head", "4", "--n-embd", "32", "--block-size", str(BLOCK),
       "--precision", "fp32", "--eval-tokens", "512", "--log-every", "100", "--sample-tokens", "0",
       "--profile", "false", "--steps", "1000", "--warmup-steps", "2", "--save-every", "-1"]
BATCH = ["--global-batch-size", "8", "--micro-batch-size", "2"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one process": (1, ["--ds-config", "ddp"]),
    "zero0 on 1": (1, ["--ds-config", "zero0"]),
    "ddp on 2": (2, ["--ds-config", "ddp"]),
    "zero3 on 2": (2, ["--ds-config", "zero3"]),
    "tp2 on 2": (2, ["--ds-config", "tp2"]),
    "pp2 on 2": (2, ["--ds-config", "pp2"]),
    "zero1 on 3, global batch 6": (3, ["--ds-config", "zero1", "--global-batch-size", "6"]),
    "ddp": (4, ["--ds-config", "ddp"]),
    "fsdp2": (4, ["--ds-config", "fsdp2"]),
    "fsdp2_within2": (4, ["--ds-config", "fsdp2_within2"]),
    "zero0": (4, ["--ds-config", "zero0"]),
    "zero1": (4, ["--ds-config", "zero1"]),
    "zero2": (4, ["--ds-config", "zero2"]),
    "zero2, micro-batch 1": (4, ["--ds-config", "zero2", "--micro-batch-size", "1"]),
    "zero3": (4, ["--ds-config", "zero3"]),
    "zero3_hpz2": (4, ["--ds-config", "zero3_hpz2"]),
    "zero3_offload_optimizer": (4, ["--ds-config", "zero3_offload_optimizer"]),
    "zero3_offload_all": (4, ["--ds-config", "zero3_offload_all"]),
    "zero3_nvme": (4, ["--ds-config", "zero3_nvme"]),
    "tiled": (4, ["--ds-config", "tiled"]),
    "tp2": (4, ["--ds-config", "tp2"]),
    "tp2_zero1": (4, ["--ds-config", "tp2_zero1"]),
    "tp2_zero3": (4, ["--ds-config", "tp2_zero3"]),
    "tp4": (4, ["--ds-config", "tp2", "--tp", "4"]),
    "pp2": (4, ["--ds-config", "pp2"]),
    "pp2, micro-batch 1": (4, ["--ds-config", "pp2", "--micro-batch-size", "1"]),
    "pp4": (4, ["--ds-config", "pp2", "--pp", "4"]),
    "pp2_tp2": (4, ["--ds-config", "pp2_tp2"]),
    "sp2": (4, ["--ds-config", "sp2"]),
    "sp4": (4, ["--ds-config", "sp2", "--sp", "4"]),
}
"""Ranks and options of every layout that fits on at most 4 CPU ranks."""
OPS = ("cpu_adam", "pin_memory", "async_io")
STEPS = 3
CLOSE = 1e-5


def words_of(name: str) -> list[str]:
    return [*RUN, *BATCH, *LAYOUTS[name][1]]


def ask(server: Server, folder: Path, program: str, name: str, words: Iterable[str] = (), ranks: int | None = None,
        **arguments: Any) -> dict[str, Any]:
    """Run a program of resuming.py under the layout `name` and return its result."""
    run_dir = folder / f"{program}-{name.replace(' ', '_')}-{len(list(folder.iterdir()))}"
    out = run_dir.with_suffix(".json")
    request = {"words": [*words_of(name), *words], "steps": STEPS, "out": str(out), **arguments}
    server.run(LAYOUTS[name][0] if ranks is None else ranks, [json.dumps(request)], run_dir, f"resuming:{program}")
    return json.loads(out.read_text())


def largest_difference(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def hash_of(stream: Any, consumed: int, seed: int = 1337) -> str:
    """Return the hash of the first samples, read one at a time without ranks or batches."""
    samples = Batches(stream, block_size=BLOCK, seed=seed, global_batch=1, micro_batch=1, dp_rank=0, dp_size=1)
    total = sum(hash_samples(number, samples.micro_batches(number)[0][0]) for number in range(consumed))
    return Position(consumed, total % 2**64).sample_hash


def compare(saved: dict[str, Any], resumed: dict[str, Any]) -> dict[str, float]:
    """Check that the samples are equal; return the largest difference of losses by "saved -> resumed" layout."""
    differences = {}
    for after, runs in resumed.items():
        for before, run in runs.items():
            pair = f"{before} -> {after}"
            differences[pair] = largest_difference(run["losses"], saved[before]["losses"])
            assert (run["consumed"], run["sample_hash"]) == (saved[before]["consumed"],
                                                             saved[before]["sample_hash"]), pair
    return differences


@pytest.mark.full
def test_a_few_pairs_of_layouts(server: Server, tmp_path: Path) -> None:
    """Resume each layout from the checkpoints of several others."""
    first = ("zero3 on 2", "pp2_tp2", "fsdp2_within2", "one process")
    saved = {name: ask(server, tmp_path, "save_and_go_on", name) for name in first}
    folders = {name: result["folder"] for name, result in saved.items()}
    resumed = {name: ask(server, tmp_path, "go_on_from_each", name, checkpoints=folders)
               for name in ("tp2", "zero2", "fsdp2_within2")}
    differences = compare(saved, resumed)
    assert len(differences) == 12
    assert max(differences.values()) < CLOSE, differences
    assert len(set(saved["one process"]["losses"])) == STEPS
    data = TokenData.open(prepare("stdlib", progress=False))
    assert saved["pp2_tp2"]["sample_hash"] == hash_of(data.split("train"), saved["pp2_tp2"]["consumed"])


def legal_pairs() -> list[tuple[str, str]]:
    """Return all pairs (saved, resumed) of layouts with the same global batch."""
    return [(before, after) for after in LAYOUTS for before in LAYOUTS
            if _global_batch(before) == _global_batch(after)]


@pytest.fixture(scope="module")
def saved_by_each(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of `save_and_go_on`, with a checkpoint, for every layout."""
    if not all(map(is_built, OPS)):
        pytest.skip("some layouts require DeepSpeed's ops (ezpz-llm doctor --build-ops)")
    folder = tmp_path_factory.mktemp("saved")
    return {name: ask(server, folder, "save_and_go_on", name) for name in LAYOUTS}


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_legal_pair_passes_the_check(saved_by_each: dict[str, dict[str, Any]],
                                           capsys: pytest.CaptureFixture[str]) -> None:
    """Check every pair as launch does before it starts ranks: with the whole command, in one process."""
    pairs = legal_pairs()
    recorded = {pair.replace("micro batch", "micro-batch") for pair in read_json(RESULT)["differences"]}
    assert len(recorded) == 730
    assert recorded <= {f"{before} -> {after}" for before, after in pairs}
    for before, after in pairs:
        words = ["--resume", saved_by_each[before]["folder"], *words_of(after), "--device", "cpu"]
        code = train.main([*words, "--check", "--world-size", str(LAYOUTS[after][0])])
        captured = capsys.readouterr()
        assert (code, "error" in captured.err) == (0, False), (before, after, captured.err)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_sampled_pairs_train(server: Server, saved_by_each: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    sampled = random.Random(0).sample(legal_pairs(), 20)
    resumed = {after: ask(server, tmp_path, "go_on_from_each", after, checkpoints={
                   before: saved_by_each[before]["folder"] for before, other in sampled if other == after})
               for after in {after for _, after in sampled}}
    differences = compare(saved_by_each, resumed)
    assert len(differences) == 20
    assert max(differences.values()) < CLOSE, differences


def test_random_states_are_taken_over_only_by_ranks_divided_alike(server: Server, tmp_path: Path) -> None:
    """Tensor-parallel peers must draw the same dropout masks, unlike ranks of another layout."""
    dropout = ["--dropout", "0.1"]
    saved = {name: ask(server, tmp_path, "save_and_go_on", name, dropout) for name in ("ddp on 2", "tp2 on 2")}
    folders = {name: result["folder"] for name, result in saved.items()}
    runs = ask(server, tmp_path, "go_on_from_each", "tp2 on 2", dropout, checkpoints=folders)
    assert runs["tp2 on 2"]["losses"] == saved["tp2 on 2"]["losses"]
    for before in folders:
        first, second = runs[before]["random_states"]
        assert first == second, before
    assert runs["ddp on 2"]["random_states"] != runs["tp2 on 2"]["random_states"]


@pytest.mark.full
def test_no_sample_is_lost_or_repeated_when_the_global_batch_changes(server: Server, tmp_path: Path) -> None:
    """Resume a run three times, each time with other ranks, layout, global batch and micro-batch."""
    run_dir, step = tmp_path / "run", 0
    lives = [(2, "zero1 on 3, global batch 6", ["--global-batch-size", "8", "--micro-batch-size", "1"], 5),
             (2, "tp2", ["--global-batch-size", "3", "--micro-batch-size", "3"], 9),
             (1, "ddp", ["--global-batch-size", "20", "--micro-batch-size", "5"], 12), (4, "pp2", [], 14)]
    consumed = 0
    for ranks, name, batch, until in lives:
        resume = ["--resume", str(run_dir)] if step else []
        own = {"--steps": str(until), "--save-every": "0", "--eval-every": "0"}
        words = [*words_of(name), *batch, *itertools.chain(*own.items()), *resume]
        server.run(ranks, words, run_dir)
        size = int(batch[1]) if batch else 8
        consumed, step = consumed + (until - step) * size, until
        state = read_json(find(run_dir) / STATE)
        assert (state["step"], state["consumed"]) == (until, consumed)
    record = read_record(RunDir(run_dir))
    assert record.samples_consumed == consumed == 5 * 8 + 4 * 3 + 3 * 20 + 2 * 8
    train = TokenData.open(prepare("stdlib", progress=False)).split("train")
    assert record.sample_hash == state["sample_hash"] == hash_of(train, consumed)
    assert len(complete_checkpoints(RunDir(run_dir).checkpoints)) == 2


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_pair_of_layouts(server: Server, tmp_path: Path, recording: bool) -> None:
    """Run by `python3 benchmarks/record.py resume-matrix`: 10 minutes on two cores."""
    names = [name for name in LAYOUTS if "zero3_" not in name or all(map(is_built, OPS))]
    saved = {name: ask(server, tmp_path, "save_and_go_on", name) for name in names}
    folders = {name: result["folder"] for name, result in saved.items()}
    resumed = {}
    for name in names:
        resumed[name] = ask(server, tmp_path, "go_on_from_each", name, checkpoints={
            other: folder for other, folder in folders.items() if _global_batch(other) == _global_batch(name)})
    differences = compare(saved, resumed)
    if recording:
        worst = max(differences, key=differences.__getitem__)
        write_json(RESULT, {
            "command": "python3 benchmarks/record.py resume-matrix",
            "date": datetime.date.today().isoformat(),
            "what": f"each layout saves after {STEPS} steps; every layout goes on from each for {STEPS} steps: "
                    "fp32 on CPU ranks, losses against the run that saved, samples by their hash",
            "layouts": {name: {"ranks": LAYOUTS[name][0], "words": " ".join(LAYOUTS[name][1])} for name in names},
            "pairs": len(differences), "same_samples": len(differences), "bound": CLOSE,
            "largest_difference": {worst: differences[worst]},
            "equal_to_the_last_digit": sum(value == 0 for value in differences.values()),
            "differences": differences,
        })
    assert max(differences.values()) < CLOSE
    assert all(differences[f"{name} -> {name}"] == 0 for name in names)


def _global_batch(name: str) -> str:
    words = words_of(name)
    return dict(zip(words[::2], words[1::2], strict=True))["--global-batch-size"]
