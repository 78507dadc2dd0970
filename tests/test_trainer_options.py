"""Where a training run's values come from, and how a mistyped one is answered."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ezpz_llm.errors import UserError
from ezpz_llm.trainer.options import dump, parse


def test_command_line_beats_file_beats_preset_beats_recipe(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("preset: shakespeare-char-cpu\nlr: 2e-3\nglobal-batch: 24\n")
    options = parse(["--config", str(file), "--lr", "3e-3"])
    assert options.config.lr == 3e-3
    assert options.sources["lr"] == "command line"
    assert options.config.global_batch == 24
    assert options.sources["global_batch"] == str(file)
    assert options.config.block_size == 64
    assert options.sources["block_size"] == "preset shakespeare-char-cpu"
    assert options.config.eval_tokens == 0
    assert options.sources["beta1"] == "default"


def test_naming_a_model_brings_its_recipe():
    options = parse(["--model", "gpt2-124m"])
    assert (options.config.lr, options.config.warmup_steps, options.config.steps) == (6e-4, 715, 19073)
    assert options.sources["lr"] == "recipe of gpt2-124m"


def test_printed_config_reads_back_equal(tmp_path):
    options = parse(["--model", "gpt2-124m", "--steps", "7", "--bias", "false", "--prompt", "a: 'b'"])
    file = tmp_path / "printed.yaml"
    file.write_text(dump(options.config))
    assert parse(["--config", str(file)]).config == options.config


@pytest.mark.parametrize(("argv", "found", "instead"), [
    (["--stpes", "5"], "--stpes", "--steps"),
    (["--preset", "shakespear-char-cpu"], "shakespear-char-cpu", "shakespeare-char-cpu"),
    (["--steps", "five"], "steps", "--help"),
    (["--config", "missing.yaml"], "no such configuration file", None),
])
def test_a_mistyped_word_is_named_with_what_to_type_instead(argv, found, instead):
    with pytest.raises(UserError) as raised:
        parse(argv)
    assert found in raised.value.found
    if instead:
        assert instead in raised.value.instead


@pytest.mark.parametrize(("text", "found"), [
    ("lrr: 1e-3\n", "lrr"),
    ("lr: fast\n", "lr"),
    ("- a\n- b\n", "not a list"),
    ("lr: [\n", "cannot read"),
])
def test_a_bad_file_is_refused_by_name(tmp_path, text, found):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as raised:
        parse(["--config", str(file)])
    assert found in raised.value.found
    assert str(file) in raised.value.where


def test_options_import_no_torch():
    code = "import sys, ezpz_llm.trainer.options as o; o.parse(['--steps', '5']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "False"
