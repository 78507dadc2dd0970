"""Whole training runs under launch, on real ranks, checked by their output files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from places import HELPERS, ROOT
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.core.rundir.value_source_record import Source
from ezpz_llm.training.checkpoint.manifest import complete_checkpoints
from ezpz_llm.training.checkpoint.retention import find
from ezpz_llm.training.checkpoint.state import read_state
from ezpz_llm.training.data.prepare import prepare
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.layout import ds_config
from ezpz_llm.training.trainer.checkpoint_identity import check_identity
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import plan_run
from ezpz_llm.verify.certify.cases import natural_worlds

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "80"}
SMALL = ["--n-layer", "2", "--n-embd", "64", "--block-size", "64", "--eval-tokens", "2048", "--sample-tokens", "20",
         "--log-every", "5", "--precision", "fp32"]


def train(*options: str, run_dir: Path, ranks: int = 2, timeout: int = 150) -> subprocess.CompletedProcess[str]:
    """Run training under launch."""
    command = [sys.executable, "-m", "ezpz_llm.launch", "-n", str(ranks), "--run-dir", str(run_dir),
               sys.executable, "-m", "ezpz_llm.train", *options]
    return subprocess.run(command, env=ENV, cwd=run_dir.parent, capture_output=True, text=True, timeout=timeout,
                          check=False)


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_lines(RunDir(run_dir).metrics)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run 20 steps on two ranks with validation, sample, checkpoint, plots and profile."""
    run_dir = tmp_path_factory.mktemp("run") / "whole"
    done = train(*SMALL, "--steps", "20", "--eval-every", "10", "--save-every", "10", "--trace-steps", "3",
                 "--verbose", run_dir=run_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir, done.stderr + done.stdout


@pytest.mark.full
def test_every_step_has_one_line_with_the_documented_members(finished):
    run_dir, _ = finished
    lines = list(read_lines(RunDir(run_dir).metrics))
    assert [line["step"] for line in lines] == list(range(1, 21))
    for line in lines:
        assert {"loss", "lr", "grad_norm", "step_time_s", "tokens_per_second",
                "tokens_per_second_per_device"} <= line.keys()
        phases = sum(line[f"{phase}_s"] for phase in ("data", "forward", "backward", "optimizer", "other"))
        assert phases == pytest.approx(line["step_time_s"], rel=1e-9)
        assert line["tokens_per_second"] == pytest.approx(2 * line["tokens_per_second_per_device"])
    assert [line["step"] for line in lines if "val_loss" in line] == [10, 20]
    assert {line["val_tokens"] for line in lines if "val_loss" in line} == {2048}
    assert lines[-1]["loss"] < lines[0]["loss"] - 1


def test_the_record_contains_settings_and_results(finished):
    run_dir, _ = finished
    record = read_record(RunDir(run_dir))
    assert record.launch.world_size == 2
    assert record.exit.code == 0
    assert record.config["steps"] == 20
    assert record.sources["steps"] == Source("command_line")
    assert 3.0 < record.unigram_entropy < 3.5
    assert record.val_loss == list(read_lines(RunDir(run_dir).metrics))[-1]["val_loss"]
    assert record.samples_consumed == 20 * 8
    assert sum(record.summary.phase_share.values()) == pytest.approx(1.0)
    assert record.flops_per_token["is_proven"]
    assert record.peak is None, "a CPU has no stated peak"
    assert (record.summary.mfu, record.summary.mfu_causal) == (None, None)
    assert record.ceiling["flops"] >= record.ceiling["slowest_flops"] > 1e8
    assert record.summary.ceiling_share > 0
    assert json.loads((run_dir / "deepspeed.json").read_text())["zero_optimization"]["stage"] == 1
    assert json.loads((run_dir / "layout.json").read_text())["layout"]["name"] == "zero1"


def test_plots_profile_logs_and_checkpoints_exist(finished):
    run_dir, _ = finished
    plots = {path.name for path in (run_dir / "plots").iterdir()}
    assert {"loss.txt", "tokens_per_second.txt"} <= plots
    assert "train_step" in (run_dir / "profile" / "host.txt").read_text()
    assert (run_dir / "profile" / "host.html").stat().st_size > 10_000
    assert (run_dir / "profile" / "trace-rank0000.json.gz").stat().st_size > 1000
    logs = sorted(path.name for path in (run_dir / "logs").iterdir())
    assert logs == ["launcher.log", "rank0000.log", "rank0001.log"]
    assert (run_dir / "checkpoints" / "latest").read_text().strip() == "step-00000020"
    assert not list((run_dir / "errors").iterdir())
    network = json.loads((run_dir / "run.json").read_text())["environment"]["network"]
    assert (network["library"], network["network"], network["interface"]) == ("gloo", "tcp", "lo")


def test_the_console_shows_what_a_user_looks_for(finished):
    run_dir, text = finished
    for word in ("scheduler", "launcher", "mpiexec", "cpu, backend gloo", "zero1, fp32", "flash_attention",
                 "token frequencies alone", "sample after step 20", "torch's FLOP counter agrees",
                 "FLOP/s measured (fp32 matmul; slowest: rank", "estimated sum, measured peak",
                 "of the matmul peak", "Step-time breakdown", "host.html",
                 "report.html", f"ezpz-llm report {run_dir.name}", f"--resume {run_dir.name} --steps 40",
                 str(run_dir)):
        assert word in text, word
    assert re.search(r"20/20 +100% +\d+\.\d{4} +\d+\.\d +[\d.]+k? +\d+:\d\d +0:00 +\d+\.\d{4}", text)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["zero3", *(pytest.param(name, marks=pytest.mark.slow)
                                               for name in ("ddp", "zero1", "zero2"))])
def test_ten_steps_and_ten_after_a_resume_are_twenty_steps(layout, finished, tmp_path):
    """Require bitwise equal losses in a new process group, with dropout."""
    steps = [*SMALL, "--steps", "8", "--ds-config", layout, "--dropout", "0.1", "--eval-every", "4",
             "--save-every", "4", "--sample-tokens", "0", "--profile", "false"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    done = train(*steps, run_dir=whole)
    assert done.returncode == 0, done.stdout + done.stderr
    done = train(*steps, "--resume", str(whole / "checkpoints" / "step-00000004"), run_dir=resumed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming after step 4" in done.stdout
    assert losses(resumed) == losses(whole)[4:]
    records = [read_record(RunDir(run_dir)) for run_dir in (whole, resumed)]
    assert records[0].sample_hash == records[1].sample_hash
    assert records[0].val_loss == records[1].val_loss


ALSO = ["fsdp2", "pp2_tp2", "sp2", "tiled"]
REST = [name for name in ds_config.names() if name not in (*ALSO, "zero1")]


@pytest.mark.full
@pytest.mark.parametrize("layout", [*ALSO, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)])
def test_every_layout_trains_validates_samples_saves_and_plots(layout, finished, tmp_path):
    """Expect the same output files as of zero1; certify compares the losses."""
    run_dir = tmp_path / "run"
    ranks = next(world for world in natural_worlds(layout) if world > 1)
    done = train(*SMALL, "--steps", "10", "--eval-every", "10", "--ds-config", layout, "--global-batch-size", "8",
                 "--lr", "1e-3", "--warmup-steps", "1", ranks=ranks, run_dir=run_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    training = losses(run_dir)
    assert len(training) == 10
    assert training[-1] < training[0] - 0.2
    assert read_record(RunDir(run_dir)).val_loss < training[0] - 0.2
    assert "sample after step 10" in done.stdout
    assert len(complete_checkpoints(RunDir(run_dir).checkpoints)) == 1
    assert {path.name for path in RunDir(run_dir).plots.iterdir()} == {
        path.name for path in RunDir(finished[0]).plots.iterdir()}


@pytest.mark.full
def test_ranks_micro_batch_and_accumulation_only_divide_the_step(tmp_path):
    """Expect the same samples, losses and gradient norms for every split of the global batch."""
    options = [*SMALL, "--steps", "6", "--ds-config", "ddp", "--global-batch-size", "8", "--sample-tokens", "0",
               "--profile", "false", "--save-every", "-1"]
    runs = {}
    for name, ranks, cut in (("whole", 1, "1"), ("micro-steps", 1, "4"), ("ranks and micro-steps", 2, "2")):
        done = train(*options, "--gradient-accumulation-steps", cut, run_dir=tmp_path / name, ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr
        runs[name] = list(read_lines(RunDir(tmp_path / name).metrics)), read_record(RunDir(tmp_path / name))
    expected, record = runs.pop("whole")
    for lines, other in runs.values():
        assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], abs=1e-5)
        assert [line["grad_norm"] for line in lines] == pytest.approx([line["grad_norm"] for line in expected],
                                                                      rel=1e-4)
        assert other.sample_hash == record.sample_hash
        assert other.val_loss == pytest.approx(record.val_loss, abs=1e-4)


@pytest.mark.parametrize(("options", "message"), [
    (["--steps", "30", "--seed", "7"], "the checkpoint's seed is 1337, this run's is 7"),
    (["--steps", "10"], "the checkpoint is of step 20, but this run ends at step 10"),
    (["--steps", "30", "--n-head", "2"], "n_head is 4 in the checkpoint and 2 in this run"),
])
def test_a_checkpoint_that_does_not_fit_is_rejected_before_any_rank_starts(options, message, finished, tmp_path):
    run_dir, _ = finished
    done = train(*SMALL, *options, "--resume", str(run_dir), run_dir=tmp_path / "other", timeout=120)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.full
def test_a_run_on_own_text_resumes_in_its_directory(tmp_path):
    """Use prepared shards of a text without newlines, one process, and intervals that do not divide the steps."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question " * 60)
    folder = prepare(str(tmp_path / "text.txt"), "char", out=tmp_path / "shards", progress=False)
    run_dir = tmp_path / "run"
    options = [*SMALL, "--corpus", str(folder), "--eval-every", "3", "--save-every", "0", "--profile", "false",
               "--ds-config", "ddp", "--run-dir", str(run_dir), "--log-every", "4"]

    def alone(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ezpz_llm.train", *options, *more]
        return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=scaled(60), check=False)

    done = alone("--steps", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sample after step 5" in done.stdout
    kept = (run_dir / "metrics.jsonl").read_bytes()
    done = alone("--steps", "8", "--resume", str(run_dir), "--sample-tokens", "0", "--save-every", "-1")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = list(read_lines(RunDir(run_dir).metrics))
    assert (run_dir / "metrics.jsonl").read_bytes().startswith(kept)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["step"] for line in lines if "val_loss" in line] == [3, 5, 6, 8]
    # The validation split is shorter than --eval-tokens and used whole: every token but the first is predicted.
    assert {line["val_tokens"] for line in lines if "val_loss" in line} == {245}
    assert [p.name for p in complete_checkpoints(RunDir(run_dir).checkpoints)] == ["step-00000005"]
    saved = find(run_dir)
    resumed = parse([*options, "--steps", "9", "--resume", str(run_dir)])
    tokens = TokenData.open(folder)
    plan = plan_run(resumed, 1, vocab_size=tokens.vocab_size)
    state = msgspec.structs.replace(read_state(saved), data="other tokens")
    with pytest.raises(UserError, match=f"the tokens of {folder} differ from the checkpoint's"):
        check_identity(plan.config, plan.model, saved, state, tokens)
    for wrong, message in ((["--prompt", "É"], "unknown character 'É'"), (["--block-size", "4096"], "too few"),
                           (["--tokenizer", "bytes"], "was prepared with the tokenizer char")):
        done = alone(*wrong, "--run-dir", str(tmp_path / "none"))
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_a_directory_with_a_run_is_not_overwritten(finished):
    run_dir, _ = finished
    before = (run_dir / "metrics.jsonl").read_bytes()
    done = train(*SMALL, "--steps", "30", run_dir=run_dir, timeout=120)
    assert done.returncode == 2
    assert f"--resume {run_dir}" in done.stderr
    assert (run_dir / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(("options", "message"), [
    (["--model", "gpt2-125m"], "did you mean gpt3-125m or gpt2-124m"),
    (["--ds-config", "zero5"], "unknown ds_config 'zero5'"),
    (["--corpus", "missing.txt"], "no such corpus file"),
    (["--global-batch-size", "7"], "a global batch of 6 or 8"),
    (["--global-batch-size", "1"], "cannot feed 2"),
    (["--resume", "missing"], "no run directory or checkpoint at missing"),
    (["--model", "gpt2"], "did you mean gpt2-124m"),
    (["--n-head", "3"], "not a multiple of 3 heads"),
    (["--steps", "10", "--warmup-steps", "20"], "--warmup-steps 1"),
    (["--steps", "0"], "1 or more"),
])
def test_a_mistake_is_found_before_any_rank_starts(options, message, tmp_path):
    done = train(*options, run_dir=tmp_path / "run", timeout=120)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_check_imports_no_torch():
    code = ("import sys; from ezpz_llm.train import main; code = main(['--check', '--world-size', '4']); "
            "print(code, 'torch' in sys.modules, 'deepspeed' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          timeout=scaled(120), check=True)
    assert done.stdout.splitlines()[-1] == "0 False False"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "zero1"])
def test_compiled_blocks_train_alike(layout, tmp_path):
    options = [*SMALL, "--steps", "6", "--ds-config", layout, "--profile", "false"]
    for name in ("false", "true"):
        done = train(*options, "--compile", name, run_dir=tmp_path / name, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "true") == pytest.approx(losses(tmp_path / "false"), abs=1e-4)


@pytest.mark.slow
def test_yardstick(tmp_path):
    """Run nanoGPT's CPU example under every layout; needs tiny Shakespeare in EZPZ_LLM_TEST_DATA."""
    text = Path(os.environ.get("EZPZ_LLM_TEST_DATA", "../shared/data")) / "tinyshakespeare.txt"
    if not text.is_file():
        pytest.skip(f"{text} is missing: set EZPZ_LLM_TEST_DATA to its folder")
    script = ROOT / "benchmarks" / "yardstick.py"
    subprocess.run([sys.executable, str(script), str(text)], env=ENV, timeout=scaled(3600), check=True)


@pytest.mark.full
def test_an_exception_is_reported_before_groups_are_destroyed(tmp_path):
    """Report the exception before destroying NCCL groups, in which the failed rank would wait for the others."""
    command = [sys.executable, "-m", "ezpz_llm.launch", "-n", "2", "--run-dir", str(tmp_path / "run"),
               sys.executable, str(HELPERS / "blocking_train.py"), *SMALL, "--ds-config", "ddp",
               "--steps", "100000"]
    began = time.monotonic()
    done = subprocess.run(command, env={**ENV, "FAILS_IN": "5"}, cwd=tmp_path, capture_output=True, text=True,
                          timeout=scaled(150), check=False)
    assert time.monotonic() - began < scaled(120)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." in done.stderr
    assert "a smaller micro-batch (--micro-batch-size)" in done.stderr
    failure = json.loads((tmp_path / "run" / "errors" / "rank0001.json").read_text())
    assert (failure["exit_code"], failure["exception"]["type"]) == (1, "torch.OutOfMemoryError")


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_memory_table_shows_hpzs_second_copy_as_estimated(precision, tmp_path):
    layout = tmp_path / "zeropp.json"
    layout.write_text(json.dumps({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}))
    done = train(*SMALL, "--ds-config", str(layout), "--steps", "2", "--save-every", "-1", "--verbose",
                 "--precision", precision, run_dir=tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "second copy of parameters (hpZ)" in done.stdout
    memory = read_record(RunDir(tmp_path / "run")).memory
    assert memory.measured["secondary"] == pytest.approx(memory.expected["secondary"], rel=0.01)
