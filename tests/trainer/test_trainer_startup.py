"""Durations of the start-up, in a real run under launch."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from slowness import scaled

from ezpz_llm.training.trainer.callbacks.startup_report import durations


def test_durations_are_the_differences_of_marks() -> None:
    marks = [("imports", 12.0), ("data", 12.5), ("first step", 20.0)]
    assert durations(marks, 10.0, 9.0) == {"launching": 1.0, "imports": 2.0, "data": 0.5, "first step": 7.5}
    assert durations(marks, 10.0, None) == {"imports": 2.0, "data": 0.5, "first step": 7.5}


@pytest.mark.full
def test_a_run_reports_the_durations_of_its_start_up(tmp_path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 200)
    words = [sys.executable, "-m", "ezpz_llm.launch", "-n", "1", "--run-dir", str(tmp_path / "run"), sys.executable,
             "-m", "ezpz_llm.train", "--ds-config", "ddp", "--corpus", str(text), "--n-layer", "1", "--block-size",
             "32", "--steps", "2", "--eval-every", "0", "--sample-tokens", "0", "--save-every", "-1",
             "--profile", "false", "--device", "cpu", "--compile", "true", "--verbose"]
    began = time.time()
    done = subprocess.run(words, capture_output=True, text=True, timeout=scaled(200), check=False)
    took = time.time() - began
    assert done.returncode == 0, done.stderr
    assert "s to the end of the first step: launching" in done.stdout
    assert "Warning" not in done.stdout + done.stderr
    startup = json.loads((tmp_path / "run" / "run.json").read_text())["startup"]
    assert list(startup["seconds"]) == ["launching", "imports", "rendezvous", "data", "measuring the device",
                                        "engine", "the rest", "first step", "compiling"]
    # The kernel reports the start of a process in units of 0.01 s.
    assert all(seconds > -0.02 for seconds in startup["seconds"].values())
    assert startup["total_s"] == pytest.approx(sum(startup["seconds"].values()))
    assert startup["seconds"]["compiling"] > 0.1
    assert startup["graphs"]["compiled"] + startup["graphs"]["loaded"] > 0
    assert f"compiled   {startup['graphs']['compiled']} graphs" in done.stdout
    assert 0.5 < startup["seconds"]["imports"] < startup["total_s"] < took


USED = """
import sys
from ezpz_llm.train import main
code = main(sys.argv[1:])
print(*sorted(set(sys.modules) & {HEAVY}), file=sys.stderr)
raise SystemExit(code)
"""
HEAVY = {"deepspeed", "mlflow", "wandb", "pandas", "pyarrow", "scipy", "transformers", "datasets", "mpi4py", "rich",
         "pyinstrument", "tensorboard", "ClusterShell", "torch._inductor.lowering", "torch.utils.tensorboard",
         "ezpz_llm.training.engine.deepspeed_engine", "ezpz_llm.training.engine.torch_engine",
         "ezpz_llm.training.engine.fsdp2_engine", "ezpz_llm.training.engine.pipeline_engine"}
"""Modules that not every run needs; most cost a fraction of a second on every rank."""


@pytest.mark.full
@pytest.mark.parametrize(("layout", "used"), [
    ("ddp", {"ezpz_llm.training.engine.torch_engine"}),
    # DeepSpeed's autotuner would import MLflow, its Muon torch's compiler.
    ("zero1", {"deepspeed", "ezpz_llm.training.engine.deepspeed_engine"}),
    ("zero3", {"deepspeed", "ezpz_llm.training.engine.deepspeed_engine"}),
])
def test_a_run_imports_only_what_it_uses(tmp_path, layout, used) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 200)
    words = ["--ds-config", layout, "--corpus", str(text), "--n-layer", "1", "--block-size", "32", "--steps", "2",
             "--sample-tokens", "0", "--profile", "false", "--device", "cpu", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", USED.replace("HEAVY", repr(HEAVY)[1:-1]), *words],
                          capture_output=True, text=True, timeout=scaled(120), check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stderr.splitlines()[-1].split()) == used
