"""The default peak rate: that of the recipe it was tuned for, less for short runs and wide models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from slowness import scaled

from ezpz_llm.rundir import RunDir, read_lines
from ezpz_llm.trainer.options import parse
from ezpz_llm.trainer.plan import plan_run


@pytest.mark.parametrize(("words", "rate", "source"), [
    ([], 0.004, "default"),
    (["--steps", "200"], 0.004, "default"),
    (["--n-embd", "64"], 0.004, "default"),
    (["--steps", "50"], 0.002, "follows from width and steps"),
    (["--n-embd", "256"], 0.002, "follows from width and steps"),
    (["--steps", "50", "--lr", "0.004"], 0.004, "command line"),
    (["--steps", "50", "--model", "gpt2-124m"], 6e-4, "recipe of gpt2-124m"),
])
def test_the_default_rate_follows_width_and_steps_and_a_given_one_does_not(words, rate, source):
    plan = plan_run(parse(words), 1)
    assert (plan.config.lr, str(plan.sources["lr"])) == (rate, source)
    assert plan.config.min_lr == rate / 10


@pytest.mark.full
def test_twenty_steps_of_the_default_never_rise_above_their_first_loss(tmp_path: Path):
    """At 0.004 the thirteenth step had 8.15, the first 5.60."""
    words = ["--steps", "20", "--ds-config", "ddp", "--eval-tokens", "2048", "--sample-tokens", "0", "--profile",
             "false", "--save-every", "-1", "--device", "cpu", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-m", "ezpz_llm.train", *words], capture_output=True, text=True,
                          timeout=scaled(300), check=False)
    assert done.returncode == 0, done.stderr
    first, *later = (line["loss"] for line in read_lines(RunDir(tmp_path / "run").metrics))
    assert max(later) < first
    assert later[-1] < first - 1.5
