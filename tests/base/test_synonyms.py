"""Options of other trainers and launchers, passed to the parsers of train, launch, and submit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from slowness import scaled

from ezpz_llm.core.base import UserError
from ezpz_llm.core.base.synonyms import options_in, rows
from ezpz_llm.launcher.jobs import option_parsing
from ezpz_llm.launcher.submit import options as submit_options
from ezpz_llm.training.data import command as data
from ezpz_llm.training.trainer import options as trainer_options

ROOT = Path(__file__).parents[2]
TRAIN = {word for action in trainer_options.build_parser()._actions for word in action.option_strings}
LAUNCH = {word for option in option_parsing._OPTIONS for word in option.words}


PARSERS = {
    "train": trainer_options.parse,
    "launch": lambda words: option_parsing.parse([*words, "python3", "x.py"]),
    "submit": lambda words: submit_options.parse([*words, "launch", "x"]),
}


def error_of(command: str, *words: str) -> UserError:
    with pytest.raises(UserError) as raised:
        PARSERS[command](words)
    return raised.value


def spellings(option: str) -> set[str]:
    begin = re.match("-*", option)[0]
    name = option[len(begin):]
    return {option, begin + name.replace("-", "_"), begin + name.replace("_", "-")}


def test_table_has_the_well_known_programs_and_links_to_their_docs():
    assert len(rows()) > 150
    for name in ("accelerate", "Hugging Face", "deepspeed", "torchrun", "nanoGPT", "torchtitan", "Megatron"):
        assert sum(name in row.program for row in rows()) >= 5, name
    for row in rows():
        assert row.docs.startswith("https://") or (ROOT / row.docs).is_file()
        assert row.answers


STARTERS = ("torchrun", "torch.distributed.launch", "accelerate launch", "mpiexec")
"""Programs for which launch has an answer to every option."""
TRAINERS = ("Hugging Face's Trainer", "Megatron", "nanoGPT", "torchtitan")
"""Programs for which train has an answer to every option, except for data preparation and sampling."""
ELSEWHERE = {"--max_new_tokens", "--num_samples"}


@pytest.mark.parametrize(("command", "known", "programs"), [
    ("train", TRAIN, TRAINERS), ("launch", LAUNCH, STARTERS)])
def test_each_row_has_an_answer_with_existing_options(command, known, programs, monkeypatch):
    parser = trainer_options.build_parser()
    monkeypatch.setattr(trainer_options, "build_parser", lambda: parser)  # building it takes 20 ms per row
    for row in rows():
        for option in spellings(row.option):
            if option.replace("_", "-") in known:
                continue
            error = error_of(command, option, "3")
            assert row.program in error.found, option
            assert "did you mean" not in error.instead, option
            assert set(options_in(error.instead)) <= known, option
            if row.program in programs and row.option not in ELSEWHERE:
                assert any(error.instead in other.answers for other in rows()), option


@pytest.mark.parametrize(("typed", "meant"), [
    # Reported by users.
    ("--lora", "trains all weights"), ("--lora-r", "trains all weights"), ("--qlora", "trains all weights"),
    ("--local_rank=0", "launch -n N COMMAND"), ("--local-rank=0", "launch -n N COMMAND"),
    ("--deepspeed", "--ds-config"), ("--deepspeed_config", "--ds-config"), ("--epochs", "--steps"),
    ("--max-steps", "--steps"), ("--data", "--corpus"), ("--zero-stage", "--ds-config"), ("--gpus", "launch -n N"),
    ("--wandb", "--track wandb"), ("--tp-size", "--tp"), ("--seq-len", "--block-size"), ("--wd", "--weight-decay"),
    # Answers from before the table was a file.
    ("--batch-size", "--micro-batch-size"), ("--batch_size", "--global-batch-size"), ("--learning-rate", "--lr"),
    ("--learning_rate", "--lr"), ("--max-iters", "--steps"), ("--output-dir", "--run-dir"),
    ("--dataset", "--corpus"), ("--tensor-parallel", "--tp"), ("--dtype", "--precision"),
    ("--lerning-rate", "--lr"),
    ("--num-gpus", "launch -n N"), ("--nproc-per-node", "launch -n N"), ("--num-workers", "leave it out"),
    ("--report-to", "--track tensorboard"), ("--tensorboard", "--track tensorboard"), ("--adam_beta1", "--beta1"),
    # Options of train with an underscore, and options of launch after the command.
    ("--n_layer", "--n-layer"), ("--global_batch_size", "--global-batch-size"), ("-n", "launch -n N, before"),
    ("--ppn", "launch --ppn P, before")])
def test_train_answers_options_of_other_programs_in_one_line(typed, meant):
    error = error_of("train", *typed.split("="), *([] if "=" in typed else ["3"]))
    assert re.search(rf"{re.escape(meant)}(?![\w-])", error.instead), error.instead
    assert "\n" not in error.instead
    assert "did you mean" not in error.instead


@pytest.mark.parametrize(("words", "meant"), [
    (["--nproc-per-node", "2"], "--ppn P"), (["--nproc_per_node=2"], "--ppn P"), (["-np", "2"], "-n N"),
    (["--num-gpus=4"], "--ppn P"), (["--nnodes", "2"], "--nodes K"), (["--timeout", "9"], "--idle-timeout S"),
    (["--num_processes", "8"], "-n N"),
    (["--learning_rate", "1"], "(options of the command come after it: launch -n 2 python3 x.py --learning_rate)")])
def test_launch_answers_options_of_other_launchers(words, meant):
    assert error_of("launch", *words).instead == meant


def test_submit_answers_short_options_of_sbatch():
    assert error_of("submit", "-t", "10").instead == "--time T"


def test_setting_of_a_configuration_file_is_answered(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 0.001\n")
    error = error_of("train", "--config", str(file))
    assert error.found == "unknown setting 'learning_rate', an option of Hugging Face's Trainer and nanoGPT"
    assert error.instead == "lr: X"


def test_origin_of_an_option_is_printed():
    done = subprocess.run([sys.executable, "-m", "ezpz_llm.train", "--local_rank=0"], capture_output=True,
                          text=True, timeout=scaled(60), check=False)
    assert done.returncode == 2
    assert "an option of deepspeed and torch.distributed.launch, which add it" in done.stderr


def test_an_option_of_another_subcommand_is_not_its_own_answer():
    with pytest.raises(UserError, match="this subcommand has no option --tokenizer") as raised:
        data.main(["show", "x", "--tokenizer", "gpt2"])
    assert re.fullmatch(r"omit --tokenizer, which is an option of .*data prepare", raised.value.instead)
