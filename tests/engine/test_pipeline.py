"""Pipelines compute the same results as one process, on balanced stages."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import thread_ranks
import torch
from hypothesis import given, strategies as st
from places import HELPERS
from slowness import scaled
from thread_ranks import ThreadMesh

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.training import checkpoint
from ezpz_llm.training.dist import Degrees
from ezpz_llm.training.engine.pipeline_engine import PipelineEngine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.layout.value_source import COMMAND_LINE
from ezpz_llm.training.model.config import MODELS, get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import init_weights
from ezpz_llm.training.model.parameters import parameter_count, placement_of
from ezpz_llm.training.model.partition import Weights, balance, part_weights, stage_bounds
from ezpz_llm.training.model.pipeline import PipelineStage
from ezpz_llm.training.model.recomputation import recompute_blocks

SCRIPT = HELPERS / "pipeline_ranks.py"
STEPS, ACCUMULATION = 8, 4
LOSS_BOUND = {"fp32": 1e-5, "bf16_autocast": 2e-3, "bf16": 4e-3}
NORM_BOUND = {"fp32": 1e-4, "bf16_autocast": 3e-2, "bf16": 3e-2}
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def run_ranks(folder: Path, ranks: int, runs: list[str]) -> str:
    """Run `pipeline_ranks.py`, assert that it succeeds, and return its output."""
    command = [shutil.which("mpiexec") or "mpiexec", "-n", str(ranks), sys.executable, str(SCRIPT), str(folder)]
    process = subprocess.run([*command, *runs], env=ENV, capture_output=True, text=True,
                             timeout=scaled(240), check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout + process.stderr


def read(folder: Path, run: str) -> dict:
    return json.loads((folder / f"{run.replace(':', '-')}.json").read_text())


def differences(folder: Path, run: str, reference: str) -> tuple[float, float]:
    """Return the largest loss difference, and the largest relative difference of gradient norms."""
    result, expected = read(folder, run), read(folder, reference)
    assert len(result["losses"]) == len(expected["losses"]) == len(result["norms"]) == STEPS
    return (max(abs(a - b) for a, b in zip(result["losses"], expected["losses"], strict=True)),
            max(abs(a - b) / b for a, b in zip(result["norms"], expected["norms"], strict=True)))


def assert_same(folder: Path, run: str, reference: str) -> None:
    precision = run.split(":")[1]
    loss, norm = differences(folder, run, reference)
    assert loss <= LOSS_BOUND[precision]
    assert norm <= NORM_BOUND[precision]


@pytest.mark.full
def test_every_family_equals_one_process(tmp_path: Path) -> None:
    families = ("qwen3", "olmo2", "slowed", "gpt2_normed")
    run_ranks(tmp_path, 2, [f"{shape}:fp32:{layout}" for shape in families for layout in ("ddp", "pp2")])
    for shape in families:
        assert_same(tmp_path, f"{shape}:fp32:pp2", f"{shape}:fp32:ddp")


loads = st.floats(0, 1e3)


@given(st.integers(1, 9), st.integers(1, 5), loads.filter(bool), loads, loads)
def test_balance_minimizes_the_heaviest_stage(blocks, stages, block, first, last) -> None:
    if stages > blocks:
        return

    def heaviest(bounds: tuple[int, ...]) -> float:
        stage_loads = [block * (stop - start) for start, stop in itertools.pairwise(bounds)]
        stage_loads[0] += first
        stage_loads[-1] += last
        return max(stage_loads)

    bounds = balance(blocks, stages, Weights(block, first, last))
    assert bounds[0] == 0
    assert bounds[-1] == blocks
    assert all(start < stop for start, stop in itertools.pairwise(bounds))
    minimum = min(heaviest((0, *cuts, blocks)) for cuts in itertools.combinations(range(1, blocks), stages - 1))
    assert heaviest(bounds) == pytest.approx(minimum)


@pytest.mark.parametrize("name", ["tiny-gpt2", "gpt2-124m", "llama3-8b"])
def test_parameter_weights_add_up_to_the_model(name: str) -> None:
    config = MODELS[name]
    weights = part_weights(config, "parameters")
    table_copy = config.padded_vocab_size * config.n_embd if config.tied else 0  # the last stage has a copy
    total = weights.block * config.n_layer + weights.first + weights.last
    assert total == parameter_count(config) + table_copy


def test_head_counts_as_time_and_embedding_as_parameters() -> None:
    config = MODELS["gpt2-124m"]
    assert stage_bounds(config, 2, "parameters") == (0, 6, 12)
    assert stage_bounds(config, 2, "time") == (0, 8, 12)  # the head takes as long as four or five blocks
    with pytest.raises(UserError, match="12 blocks cannot be divided among 13"):
        stage_bounds(config, 13, "time")


@pytest.mark.parametrize(("shape", "tied"), [("gpt2", True), ("llama", False), ("llama", True)])
def test_consecutive_stages_equal_the_model(shape: str, tied: bool) -> None:
    config = replace(get_model_config(f"tiny-{shape}", n_layer=5, n_embd=32), tied=tied)
    whole = GPT(config)
    init_weights(whole, config, 3)
    with torch.device("meta"):
        stages = [PipelineStage(GPT(config), (0, 1, 4, 5), stage) for stage in range(3)]
    names = []
    for stage in stages:
        placed = {name: placement_of(name, parameter) for name, parameter in stage.named_parameters()}
        names += [at.name for at in placed.values() if at.primary]
        stage.to_empty(device="cpu")
        stage.load_state_dict({name: dict(whole.named_parameters())[at.name] for name, at in placed.items()})
    assert sorted(names) == sorted(dict(whole.named_parameters()))
    assert [stage.table is not None for stage in stages] == [tied, False, tied]
    x = tokens = torch.randint(0, config.vocab_size, (2, 16))
    for stage in stages[:-1]:
        x = stage(x)
    assert torch.equal(stages[-1](x), whole(tokens))
    assert torch.equal(stages[-1](x, tokens, "sum"), whole(tokens, tokens, "sum"))
    assert torch.equal(stages[-1](x, last_only=True), whole(tokens, last_only=True))


def test_recomputed_blocks_keep_less_and_give_the_same_gradients() -> None:
    config = replace(get_model_config("tiny-gpt2", n_layer=4, n_embd=64), dropout=0.2)
    tokens = torch.randint(0, config.vocab_size, (2, 64))
    saved_bytes, gradients = {}, {}
    for every in (0, 2, 1):
        model = GPT(config)
        init_weights(model, config, 3)
        recompute_blocks(model, every)
        size = [0]

        def count(tensor: torch.Tensor, size: list[int] = size) -> torch.Tensor:
            size[0] += tensor.numel()
            return tensor

        torch.manual_seed(5)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = model(tokens, tokens)
        saved_bytes[every] = size[0]
        loss.backward()
        gradients[every] = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
    assert saved_bytes[1] < 0.3 * saved_bytes[0]
    assert saved_bytes[2] == pytest.approx((saved_bytes[0] + saved_bytes[1]) / 2, rel=0.02)


def test_recomputed_blocks_can_be_compiled() -> None:
    config = get_model_config("tiny-gpt2", n_layer=2, n_embd=64)
    tokens = torch.randint(0, config.vocab_size, (2, 64))
    losses = []
    for every in (0, 1):
        model = GPT(config)
        init_weights(model, config, 3)
        recompute_blocks(model, every)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for block in model.transformer["h"]:
            block.compile(backend="aot_eager")  # traces like any backend, but faster
        losses.append(model(tokens, tokens).item())
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert not torch._dynamo.utils.counters["graph_break"]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "grad"), (torch.bfloat16, "_hp_grad")])
def test_gradients_of_a_tied_embedding_are_summed_once_over_three_pipelines(dtype: torch.dtype, name: str) -> None:
    """DeepSpeed sums them once more, in any order, so that only one pipeline may have a part of the sum."""
    gradients = torch.randint(100, (3, 5, 2), generator=torch.Generator().manual_seed(0)).float()

    def sum_on_rank(mesh: ThreadMesh) -> torch.Tensor:
        weight: Any = torch.nn.Parameter(torch.zeros(5, 2))
        setattr(weight, name, gradients[mesh.dp_rank].clone())
        engine: Any = SimpleNamespace(module=SimpleNamespace(table=SimpleNamespace(weight=weight)), _mesh=mesh,
                                      _replica=mesh.place("dp", "sp"), _dtype=dtype)
        PipelineEngine._sum_over_replicas(engine)
        return getattr(weight, name)

    shares = torch.stack(thread_ranks.run_ranks(Degrees(dp=3), sum_on_rank))
    assert torch.equal(shares.sum(dim=0), gradients.sum(dim=0))
    assert (shares.count_nonzero(dim=0) <= 1).all()


@pytest.mark.parametrize(("block", "recompute", "message"), [
    ({"pipeline": {"activation_checkpoint_interval": 1}}, 1, None),
    ({"pipeline": {"activation_checkpoint_interval": 0}, "activation_checkpointing": {"profile": False}}, 0, None),
    ({}, None, None),
    ({"pipeline": {"activation_checkpoint_interval": 2}}, None, "pass --recompute K for every K-th block"),
    ({"activation_checkpointing": {"cpu_checkpointing": True}}, None, "whole input on the device"),
])
def test_activation_checkpointing_of_a_file_is_used_or_rejected(
        tmp_path: Path, block: dict, recompute: int | None, message: str | None) -> None:
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}, **block}))
    if message is not None:
        with pytest.raises(UserError, match=message):
            resolve(Request(str(path), world_size=2))
        return
    resolved = resolve(Request(str(path), world_size=2))
    assert resolved.recompute == recompute
    assert "activation_checkpointing" not in resolved.deepspeed
    assert not resolved.deepspeed.get("pipeline")
    assert resolve(Request(str(path), world_size=2, sources={"recompute": COMMAND_LINE})).recompute is None


PIPELINES = ("gpt2:fp32:pp2", "gpt2:fp32:pp2+recompute", "gpt2:bf16_autocast:pp2", "gpt2:bf16:pp2",
             "llama:fp32:pp2", "llama:bf16:pp2+recompute-half", "llama:fp32:pp2+time")
RECOMPUTED = ("gpt2:fp32:zero1+recompute", "llama:fp32:zero3+recompute")
RESUMED = ("gpt2:fp32:pp2=>gpt2:fp32:ddp", "gpt2:fp32:ddp=>gpt2:fp32:pp2", "gpt2:bf16:ddp=>gpt2:bf16:pp2",
           "gpt2:bf16:pp2=>gpt2:bf16:ddp", "llama:fp32:pp2=>llama:fp32:pp2+time")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("two-ranks")
    references = [*(f"{shape}:{precision}:ddp" for shape in ("gpt2", "llama") for precision in ("fp32", "bf16")),
                  "gpt2:bf16_autocast:ddp"]
    dropped = ["gpt2:fp32:pp2+dropout", "gpt2:fp32:pp2+dropout+recompute"]
    scaled = ["gpt2:fp16_autocast:ddp+overflow", "gpt2:fp16_autocast:pp2+overflow"]
    return folder, run_ranks(folder, 2, [*references, *PIPELINES, *RECOMPUTED, *dropped, *RESUMED, *scaled,
                                         "gpt2:fp32:pp2+untied"])


@pytest.mark.full
@pytest.mark.parametrize("run", PIPELINES)
def test_two_stages_equal_one_process(two_ranks: tuple[Path, str], run: str) -> None:
    folder, _ = two_ranks
    reference = ":".join(run.split(":")[:2]) + ":ddp"
    assert_same(folder, run, reference)
    result, expected = read(folder, run), read(folder, reference)
    bound = 1e-5 if ":fp32:" in run else 2e-3
    assert result["loss_sum"] == pytest.approx(expected["loss_sum"], rel=bound)
    actual_logits, logits = torch.tensor(result["logits"]), torch.tensor(expected["logits"])
    assert (actual_logits - logits).abs().max() <= 10 * bound * logits.abs().max()
    assert result["logits_agree"]
    assert min(expected["norms"]) > 0.5  # clipping is at work
    assert expected["losses"][-1] < expected["losses"][0]


@pytest.mark.full
@pytest.mark.parametrize("run", RECOMPUTED)
def test_other_engines_recompute_too(two_ranks: tuple[Path, str], run: str) -> None:
    assert_same(two_ranks[0], run, f"{run.split(':')[0]}:fp32:ddp")


@pytest.mark.full
def test_computing_instructions_are_timed(two_ranks: tuple[Path, str]) -> None:
    per_step = {"forward": ACCUMULATION, "backward": ACCUMULATION, "optimizer": 3}
    assert read(two_ranks[0], "gpt2:fp32:pp2")["spans"] == {name: STEPS * n for name, n in per_step.items()}


@pytest.mark.full
def test_copies_of_a_tied_embedding_stay_bitwise_identical(two_ranks: tuple[Path, str]) -> None:
    for run in ("gpt2:fp32:pp2", "gpt2:bf16_autocast:pp2", "gpt2:bf16:pp2", "gpt2:fp32:pp2+dropout",
                "gpt2:fp32:ddp=>gpt2:fp32:pp2", "gpt2:bf16:ddp=>gpt2:bf16:pp2"):
        assert read(two_ranks[0], run)["table_differs"] == 0


@pytest.mark.full
def test_unsummed_gradients_of_a_tied_embedding_are_detected(two_ranks: tuple[Path, str]) -> None:
    folder, _ = two_ranks
    loss, norm = differences(folder, "gpt2:fp32:pp2+untied", "gpt2:fp32:ddp")
    assert loss > LOSS_BOUND["bf16_autocast"]
    assert norm > NORM_BOUND["bf16_autocast"]
    assert read(folder, "gpt2:fp32:pp2+untied")["table_differs"] > 0


@pytest.mark.full
def test_recomputation_draws_the_same_dropout(two_ranks: tuple[Path, str]) -> None:
    stored, recomputed = (read(two_ranks[0], f"gpt2:fp32:pp2+dropout{more}") for more in ("", "+recompute"))
    assert stored["losses"] == recomputed["losses"]
    assert stored["losses"] != read(two_ranks[0], "gpt2:fp32:pp2")["losses"]


@pytest.mark.full
@pytest.mark.parametrize("change", RESUMED)
def test_checkpoints_move_into_and_out_of_a_pipeline(two_ranks: tuple[Path, str], change: str) -> None:
    assert_same(two_ranks[0], change, f"{':'.join(change.split(':')[:2])}:ddp")


@pytest.mark.full
def test_fp16_skips_overflowing_steps_in_all_stages(two_ranks: tuple[Path, str]) -> None:
    ddp, result = (read(two_ranks[0], f"gpt2:fp16_autocast:{layout}+overflow") for layout in ("ddp", "pp2"))
    assert result["skipped"] == ddp["skipped"] == result["norms"].count(float("inf")) > 0
    assert result["losses"] == pytest.approx(ddp["losses"], abs=LOSS_BOUND["bf16_autocast"])


@pytest.mark.full
def test_deepspeed_is_quiet(two_ranks: tuple[Path, str]) -> None:
    assert two_ranks[1] == ""


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four-ranks")
    references = ["gpt2:fp32:ddp", "gpt2:bf16:ddp+small", "llama:fp32:ddp"]
    run_ranks(folder, 4, [*references, *FOUR, "gpt2:fp32:pp2_tp2=>gpt2:fp32:pp4"])
    return folder


FOUR = ("gpt2:fp32:pp2", "gpt2:bf16:pp2", "llama:fp32:pp2+recompute", "gpt2:fp32:pp4", "llama:fp32:pp4",
        "gpt2:fp32:pp2_tp2", "llama:fp32:pp2_tp2")


@pytest.mark.slow
@pytest.mark.parametrize("run", FOUR)
def test_four_ranks_equal_one_process(four_ranks: Path, run: str) -> None:
    shape, precision, _ = run.split(":")
    # Two pipelines halve the micro-batch; in bf16, matmuls of other sizes round differently.
    reference = f"{shape}:{precision}:ddp{'+small' if precision == 'bf16' else ''}"
    assert_same(four_ranks, run, reference)
    result, expected = read(four_ranks, run), read(four_ranks, reference)
    assert result["loss_sum"] == pytest.approx(expected["loss_sum"], rel=1e-5 if precision == "fp32" else 2e-3)
    assert result["logits_agree"]
    assert result["table_differs"] in (0, None)


@pytest.mark.slow
def test_checkpoint_loads_with_other_degrees(four_ranks: Path) -> None:
    assert_same(four_ranks, "gpt2:fp32:pp2_tp2=>gpt2:fp32:pp4", "gpt2:fp32:ddp")


@pytest.mark.full
def test_run_reports_idle_time_of_stages(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    small = ["--n-layer", "4", "--n-embd", "64", "--block-size", "64", "--eval-tokens", "2048",
             "--sample-tokens", "9", "--gradient-accumulation-steps", "4", "--profile", "false", "--recompute", "2"]
    process = subprocess.run(
        [sys.executable, "-m", "ezpz_llm.launch", "-n", "2", "--run-dir", str(run_dir), sys.executable, "-m",
         "ezpz_llm.train", "--ds-config", "pp2", "--steps", "20", "--eval-every", "10", *small, "--verbose"],
        env=ENV, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(150), check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    lines = list(read_lines(RunDir(run_dir).metrics))
    assert [line["step"] for line in lines if "val_loss" in line] == [10, 20]
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert lines[-1]["val_loss"] == pytest.approx(lines[-1]["loss"], abs=0.5)
    record = read_record(RunDir(run_dir))
    assert record.config["recompute"] == 2
    bubble = record.summary.bubble
    assert bubble.expected == pytest.approx(1 / 5)  # p = 2, m = 4
    assert len(bubble.idle) == 2
    # On two cores that run other processes as well, stages idle longer, and hardly ever less.
    assert all(0.1 < idle < 0.9 for idle in bubble.idle)
    assert re.search(r"Pipeline stages idle .*: \d+\.\d%, \d+\.\d%; .*\n.* is 20\.0%", process.stdout)
    assert "sample after step 20" in process.stdout
    assert (run_dir / "plots" / "loss.txt").exists()
    assert checkpoint.find(run_dir).name == "step-00000020"


@pytest.mark.full
def test_tables_agree_to_the_last_bit_over_three_pipelines(tmp_path: Path) -> None:
    runs = ["gpt2:fp32:pp2+wide", "gpt2:fp32:pp2+wide+uneven"]
    run_ranks(tmp_path, 6, ["gpt2:fp32:ddp+wide", *runs])
    for run in runs:
        assert read(tmp_path, run)["table_differs"] == 0
        assert_same(tmp_path, run, "gpt2:fp32:ddp+wide")
    # Stages send within a group of the pipeline's two ranks, not of all six.
    assert read(tmp_path, runs[0])["sends"] == [2]
