"""The comparison with other programs: equal work, correct sums, and verdicts that can fail."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from places import ROOT
from slowness import scaled

from ezpz_llm.training.engine import precision as engine_precision
from ezpz_llm.training.model.parameters import parameter_count
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import plan_run

BENCHMARKS = ROOT / "benchmarks"
TASK = {"program": "ours", "data": "D", "scratch": "S", "n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256,
        "global_batch": 8, "steps": 12}
SCRIPT = """
import torch
from dataclasses import dataclass

@dataclass
class Config:
    width: int = 1024

STEPS = 10**9
torch.manual_seed(0)
config = Config()
weight = torch.nn.Parameter(torch.ones(config.width))
optimizer = torch.optim.AdamW([weight], lr=0.1)
for step in range(STEPS):
    loss = (weight ** 2).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a function that imports a module of benchmarks/peers by name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return lambda name: importlib.import_module(f"peers.{name}")


def run(folder: Path, *words: str, timeout: int = 250) -> tuple[dict, str]:
    """Run the benchmark. Return its result and its output."""
    out = folder / "peers.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "peers.py"), *words, "--out", str(out)], cwd=folder, capture_output=True,
        text=True, timeout=timeout, check=False, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


@pytest.mark.parametrize("vocab_size", [50304, 65])
def test_ours_and_a_plain_loop_have_the_same_model(peers, vocab_size: int) -> None:
    task = peers("task").Task(**TASK, vocab_size=vocab_size)
    plan = plan_run(parse(peers("ours").options(task)), 1, vocab_size=min(vocab_size, 50257))
    with torch.device("meta"):
        plain = peers("plain").Model(task)
    assert parameter_count(plan.model) == sum(one.numel() for one in plain.parameters())
    assert plan.model.padded_vocab_size == vocab_size
    assert plan.tokens_per_step == task.tokens_per_step == 2048
    batch = plan.resolved.batch
    assert (batch.micro_batch, batch.accumulation, plan.resolved.clip, plan.model.dropout) == (8, 1, 1.0, 0.0)
    config = plan.config
    assert (config.lr, config.beta1, config.beta2, config.weight_decay) == (6e-4, 0.9, 0.95, 0.1)


def test_ranks_are_added_up_and_a_loss_that_stands_is_told(peers) -> None:
    task = peers("task").Task(**TASK, vocab_size=65, ranks=2)
    rank = {"wall_s": [1.0, 3.0, 2.0], "cpu_s": [1.0, 1.5, 1.0], "peak_bytes": 9, "start_bytes": 4,
            "losses": [5.0, 5.1, 4.9, 5.0], "val_loss": 5.0}
    found = peers("measure").together([rank, {**rank, "cpu_s": [2.0, 2.0, 2.5]}], task)
    assert (found["step_s"], found["tokens_per_second"], found["peak_bytes"]) == (2.0, 1024, 18)
    assert found["tokens_per_cpu_second"] == pytest.approx(2048 / 3.5)
    summary = peers("summary").summary("plain-bf16", [found, found])
    assert not summary["learns"]
    assert "DOES NOT LEARN" in peers("summary").line("plain-bf16", summary)
    falling = {**found, "val_loss": 3.0}
    assert peers("summary").summary("plain-bf16", [falling])["learns"]
    assert not peers("summary").summary("plain-bf16", [falling, found])["learns"], "every round has to"


def test_bars_compare_runs_of_the_same_round(peers) -> None:
    def runs(*rates: float, **more: float) -> list[dict]:
        return [{"tokens_per_cpu_second": rate, "tokens_per_second": 2 * rate, "step_s": 1 / rate,
                 "peak_bytes": 1000, "start_bytes": 400, **more} for rate in rates]

    count = {"flops_per_token": 100.0, "flops_per_token_causal": 90.0}
    rounds = {"ours": runs(120.0, 240.0, peak_bytes=700, **count), "build-nanogpt": runs(100.0, 200.0),
              "picotron": runs(90.0, 100.0), "build-nanogpt-compiled": runs(130.0, 250.0),
              "ceiling": [{"flops": 40000.0, "flops_per_cpu_second": 20000.0}] * 2,
              "shards": runs(12000.0, 12000.0)}
    rows = {row["name"]: row for row in peers("bars").bars("cpu-50304", rounds)}
    eager = rows["ours / best eager peer (build-nanogpt), tokens a CPU-second"]
    assert (eager["median"], eager["least"], eager["most"], eager["passed"]) == (1.2, 1.2, 1.2, False)
    assert not rows["ours / build-nanogpt-compiled, tokens a CPU-second"]["passed"]
    perfect = rows["perfect run / ours, wall time"]
    assert (perfect["median"], perfect["passed"]) == (pytest.approx(0.9), True)
    assert rows["tokens read from shards / consumed, one process"]["median"] == pytest.approx(75)
    memory = rows["ours / build-nanogpt, most memory"]
    assert (memory["median"], memory["passed"]) == (0.7, False)
    assert rows["ours / build-nanogpt, most memory beyond libraries"]["median"] == 0.5
    assert "MISSED" in peers("bars").bar_line(memory)
    assert not any(name.startswith("ours-compiled") for name in rows), "what did not run has no row"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_ours_computes_in_the_precision_of_the_machine_which_is_printed(
        peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    monkeypatch.setattr(peers("measure"), "own_precision", lambda: precision)
    work = peers("programs").WORKS["cpu-50304"]
    bench = peers("measure").Bench(work, tmp_path, {"nanogpt": tmp_path}, 12, {})
    precisions = {name: bench.task(name, tmp_path).precision for name in work.programs
                  if name in ("ours", "ours-compiled", "ceiling", "plain-bf16", "nanogpt")}
    assert precisions == {"ours": precision, "ours-compiled": precision, "ceiling": precision, "plain-bf16": "bf16",
                          "nanogpt": "fp32"}
    assert peers("summary").stated("cpu-50304", bench.task("ours", tmp_path)).endswith(f"; ours in {precision}")


@pytest.mark.parametrize(("has_units", "precision"), [(True, "bf16"), (False, "fp32")])
def test_a_cpu_without_units_for_bf16_computes_in_fp32(peers, monkeypatch: pytest.MonkeyPatch, has_units: bool,
                                                       precision: str) -> None:
    monkeypatch.setitem(engine_precision._BF16_UNITS, "cpu", lambda: has_units)
    assert peers("machine").own_precision() == precision


def test_what_collectives_allow(peers) -> None:
    ddp = {"step_s": 2.0, "collectives": {"stubbed_s": [1.0, 9.0, 1.0], "seconds": 1.0}}
    zero = {"step_s": 4.0, "collectives": {"stubbed_s": [1.5], "seconds": 2.0}}
    rows = {row["name"]: row["median"] for row in
            peers("bars").bars("zero", {"ours-ddp-2": [ddp], "ours-zero3-2": [zero]})}
    assert rows == {"zero3 / ddp, speed (a stretch)": 0.5, "zero3 / what its collectives allow, speed": 0.75}


def test_a_script_runs_as_it_stands_but_for_its_numbers(peers, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "theirs.py").write_text(SCRIPT)

    def narrow(names: dict) -> None:
        wide = names["Config"]
        names["Config"] = lambda: wide(width=3)

    clock = peers("task").Clock(steps=8)
    names = peers("script").run_script(tmp_path / "theirs.py", tmp_path, clock, loss="loss", values={"STEPS": 50},
                                       after={"Config": narrow})
    losses = clock.found()["losses"]
    assert (len(losses), losses[0], names["STEPS"], names["step"]) == (8, 3.0, 50, 7)
    assert losses[-1] < losses[0]
    assert len(clock.found()["wall_s"]) == 8 - 3
    assert clock.peak_bytes >= clock.start_bytes > 0
    with pytest.raises(SystemExit, match="before it had made all its steps"):
        peers("script").run_script(tmp_path / "theirs.py", tmp_path, peers("task").Clock(steps=9), loss="loss",
                                   values={"STEPS": 8}, after={"Config": narrow})
    names["optimizer"].step()
    assert len(clock.found()["wall_s"]) == 8 - 3, "the clock's hook is gone"


@pytest.mark.parametrize("words", [("--out", "missing/peers.json"), ("--programs", "unknown"),
                                   ("--peer", "nanogpt=missing"), ("--steps", "5")])
def test_a_mistake_is_found_before_anything_runs(tmp_path: Path, words: tuple[str, str]) -> None:
    done = subprocess.run([sys.executable, str(BENCHMARKS / "peers.py"), "--work", "tiny", *words], cwd=tmp_path,
                          capture_output=True, text=True, timeout=scaled(60), check=False)
    assert done.returncode == 2
    assert f"error: {' '.join(words)}: " in done.stderr


@pytest.mark.full
def test_one_command_compares_them(tmp_path: Path) -> None:
    found, said = run(tmp_path, "--work", "tiny", "--programs", "ours,plain-bf16,nanogpt,shards")
    assert "nanogpt                 not here: --peer nanogpt=FOLDER names no checkout" in said
    ours, plain = found["programs"]["ours"], found["programs"]["plain-bf16"]
    assert ours["parameters"] == plain["parameters"]
    assert ours["rows"] == 65
    assert ours["val_loss"]["median"] == pytest.approx(plain["val_loss"]["median"], abs=0.25)
    assert ours["steps"] == plain["steps"] == 21, "24, of which 3 are left out"
    assert found["learns"]
    assert found["machine"]["versions"]["torch"] == torch.__version__
    assert [row["name"] for row in found["bars"]] == ["tokens read from shards / consumed, one process"]
    assert {"load_before", "load_after", "command", "date", "peers", "runs"} <= found.keys()
    assert not list(tmp_path.glob("runs*"))


@pytest.mark.slow
def test_ranks_have_their_collectives_measured_apart(tmp_path: Path) -> None:
    found, _ = run(tmp_path, "--work", "tiny-2", "--programs",
                   "ours-ddp-2,ours-zero1-2,ours-zero3-2,plain-bf16-ddp-2")
    names = {row["name"] for row in found["bars"]}
    assert {f"zero{stage} / what its collectives allow, speed" for stage in (1, 3)} <= names
    programs = found["programs"]
    kinds = {name: {call[0] for call in programs[name]["collectives"]["calls"]} for name in programs
             if name.startswith("ours")}
    assert "all_reduce" in kinds["ours-ddp-2"]
    assert "all_gather" in kinds["ours-zero3-2"]
    losses = [programs[name]["val_loss"]["median"] for name in kinds]
    assert max(losses) - min(losses) < 0.01, "the same training under every layout"
    gathered = sum(size * count for kind, size, count, _ in programs["ours-zero3-2"]["collectives"]["calls"]
                   if kind == "all_gather")
    assert gathered >= 4 * programs["ours-zero3-2"]["parameters"], "every parameter, once or more"
    reduced = sum(size * count for kind, size, count, _ in programs["ours-ddp-2"]["collectives"]["calls"]
                  if kind == "all_reduce")
    assert reduced >= 4 * programs["ours-ddp-2"]["parameters"]


def test_collectives_can_be_stubbed_twice_in_a_group_bound_to_a_device(peers) -> None:
    """Groups bound to a device, like NCCL's, keep the first stub and reject another stub without a device."""
    dist, stubbed_collectives = torch.distributed, peers("stubbed_collectives").stubbed_collectives
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.group.WORLD.bound_device_id = torch.device("cpu", 0)
        for _ in range(3):
            with stubbed_collectives():
                dist.all_reduce(torch.ones(2))
            # Outside, the real collectives work.
            summed = torch.ones(2)
            dist.all_reduce(summed)
            assert summed.tolist() == [1, 1]
    finally:
        dist.destroy_process_group()
