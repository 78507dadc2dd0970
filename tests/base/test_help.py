"""Help pages: examples in each, the options that one looks for first, and an answer to other programs' options."""

from __future__ import annotations

import contextlib
import importlib
import re
import subprocess
import sys

import pytest
from slowness import scaled

from ezpz_llm import cli
from ezpz_llm.base.errors import UserError
from ezpz_llm.base.parser import SYNONYMS, CommandParser
from ezpz_llm.cli import find_commands, module_of
from ezpz_llm.launch import option_parsing
from ezpz_llm.submit import options as submit_options
from ezpz_llm.trainer import options as trainer_options


def page(capsys: pytest.CaptureFixture[str], command: str, *words: str) -> str:
    """What a command's help prints."""
    main = importlib.import_module(module_of(find_commands()[command])).main
    with contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", find_commands())
def test_every_page_has_an_example_and_fits_the_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = page(capsys, command)
    before, examples = text.split("\nexamples:\n")
    assert re.search(rf"^  (launch |eval .)?.*\b{command}", examples, re.MULTILINE), text
    assert [line for line in before.partition("\n\n")[2].splitlines() if len(line) > 80] == []


def test_the_first_page_of_train_is_short(capsys):
    text = page(capsys, "train")
    assert len(re.findall(r"^  --[a-z]", text, re.MULTILINE)) == 14
    assert len(re.findall(r"^  launch ", text, re.MULTILINE)) == 3
    assert "--help-all lists all" in text


@pytest.mark.parametrize(("typed", "shown"), [
    (["ezpz-llm report"], "usage: ezpz-llm report"), (["report"], "usage: python3 -m ezpz_llm.report")])
def test_the_usage_line_is_what_was_typed(typed, shown, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", typed)
    assert page(capsys, "report").startswith(shown)


@pytest.mark.parametrize(("typed", "meant"), [
    ("--batch-size", "--micro-batch-size"), ("--batch_size", "--global-batch-size"), ("--learning-rate", "--lr"),
    ("--epochs", "--steps"), ("--max-iters", "--steps"), ("--output-dir", "--run-dir"), ("--dataset", "--corpus"),
    ("--tensor-parallel", "--tp"), ("--dtype", "--precision"), ("--lerning-rate", "--lr"),
    ("--gpus", "launch"), ("--num-gpus", "launch"), ("--nproc-per-node", "launch"),
    ("--num-workers", "leave"), ("--report-to", "tensorboard")])
def test_options_of_other_trainers_are_answered_in_one_line(typed, meant):
    with pytest.raises(UserError) as raised:
        trainer_options.parse([typed, "3"])
    assert meant in raised.value.instead.split()
    assert "\n" not in raised.value.instead


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard"])
def test_a_tracker_is_answered_with_its_own_option(tracker):
    with pytest.raises(UserError) as raised:
        trainer_options.parse([f"--{tracker}"])
    assert raised.value.instead == f"--track {tracker}"


@pytest.mark.parametrize("word", ["status", "tail", "follow"])
def test_what_others_call_watch_leads_there(word):
    with pytest.raises(UserError) as raised:
        cli._dispatch([word])
    assert raised.value.instead == "ezpz-llm watch"


def test_what_is_offered_for_a_synonym_exists():
    known = {word for action in trainer_options.build_parser()._actions for word in action.option_strings}
    for typed, meant in trainer_options._SYNONYMS.items():
        assert typed not in known
        assert set(re.findall(r"--[a-z][a-z0-9-]*", meant)) <= known, typed


@pytest.mark.parametrize(("words", "meant"), [
    (["--nproc-per-node", "2"], "--ppn P"), (["-np", "2"], "-n N"), (["--num-gpus=4"], "--ppn P"),
    (["--nnodes", "2"], "--nodes K"), (["--timeout", "9"], "--idle-timeout S")])
def test_options_of_other_launchers_are_answered(words, meant):
    with pytest.raises(UserError) as raised:
        option_parsing.parse([*words, "x"])
    assert raised.value.instead == meant


def test_sbatchs_short_options_are_answered():
    with pytest.raises(UserError) as raised:
        submit_options.parse(["-t", "10", "launch", "x"])
    assert raised.value.instead == "--time T"


def test_a_mistake_in_any_command_is_one_message():
    parser = CommandParser("x", description="…")
    below = parser.add_subparsers(dest="command").add_parser("export")
    below.add_argument("--tokens")
    for words, found, instead in (
            (["exprt"], "command: invalid choice: 'exprt'", "did you mean export?"),
            (["export", "--tokns", "1"], "unknown option '--tokns'", "did you mean --tokens?"),
            (["export", "--max-new-tokens", "1"], "unknown option '--max-new-tokens'", "--tokens"),
            (["export", "--tokens"], "argument --tokens: expected one argument", "export --help lists"),
            (["export", "more"], "unrecognized arguments: more", "--help")):
        with pytest.raises(UserError) as raised:
            parser.parse_args(words)
        assert raised.value.found == found
        assert instead in raised.value.instead
    assert "--tokens" in SYNONYMS.values()


def test_the_list_of_commands_is_grouped_and_every_line_leads_to_a_command():
    done = subprocess.run([sys.executable, "-c", "from ezpz_llm.cli import main; main()"], capture_output=True,
                          text=True, timeout=scaled(60), check=False, env={"COLUMNS": "60", "PATH": ""})
    named = re.findall(r"^  ([a-z_]+)  ", done.stdout, re.MULTILINE)
    assert sorted(named) == list(find_commands())
    assert done.stdout.count("\n\n") == 7
