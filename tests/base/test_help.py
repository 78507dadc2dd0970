"""Help pages with examples and the main options, and suggestions for unknown options."""

from __future__ import annotations

import contextlib
import importlib
import re
import subprocess
import sys

import pytest
from slowness import scaled

from ezpz_llm import cli
from ezpz_llm.cli import find_commands, module_of
from ezpz_llm.core.base.command_parser import CommandParser
from ezpz_llm.core.base.errors import UserError


def page(capsys: pytest.CaptureFixture[str], command: str, *words: str) -> str:
    """Return the help page of a command."""
    main = importlib.import_module(module_of(find_commands()[command])).main
    with contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", find_commands())
def test_help_page_has_an_example_and_fits_the_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = page(capsys, command)
    before, examples = text.split("\nexamples:\n")
    assert re.search(rf"^  (launch |eval .)?.*\b{command}", examples, re.MULTILINE), text
    assert [line for line in before.partition("\n\n")[2].splitlines() if len(line) > 80] == []


def test_help_page_of_train_is_short(capsys):
    text = page(capsys, "train")
    assert len(re.findall(r"^  --[a-z]", text, re.MULTILINE)) == 14
    assert len(re.findall(r"^  launch ", text, re.MULTILINE)) == 3
    assert "--help-all lists all" in text


@pytest.mark.parametrize(("typed", "shown"), [
    (["ezpz-llm report"], "usage: ezpz-llm report"), (["report"], "usage: python3 -m ezpz_llm.report")])
def test_usage_line_is_as_typed(typed, shown, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", typed)
    assert page(capsys, "report").startswith(shown)


@pytest.mark.parametrize("word", ["status", "tail", "follow"])
def test_other_names_of_watch_are_suggested(word):
    with pytest.raises(UserError) as raised:
        cli._dispatch([word])
    assert raised.value.instead == "ezpz-llm watch"


def test_invalid_arguments_raise_a_user_error():
    parser = CommandParser("x", description="…")
    subparser = parser.add_subparsers(dest="command").add_parser("export")
    subparser.add_argument("--tokens")
    for words, found, instead in (
            (["exprt"], "command: invalid choice: 'exprt'", "did you mean export?"),
            (["export", "--tokns", "1"], "unknown option '--tokns'", "did you mean --tokens?"),
            (["export", "--max-new-tokens", "1"],
             "unknown option '--max-new-tokens', an option of Hugging Face's Trainer", "--tokens"),
            (["export", "--tokens"], "--tokens needs a value", "export --help lists"),
            (["export", "more"], "unexpected: more", "--help")):
        with pytest.raises(UserError) as raised:
            parser.parse_args(words)
        assert raised.value.found == found
        assert instead in raised.value.instead


@pytest.mark.parametrize("words", [
    *([command, "--no-such-option"] for command in find_commands()),
    ["report", "--html"], ["layouts", "--world", "x"], ["why", "--stacks", "q"], ["explain", "more", "more"],
    ["checkpoint"], ["checkpoint", "exprt"], ["checkpoint", "export", "--shard-gb", "x"], ["data", "prepare"],
    ["evaluate", "foo"], ["scale", "report"], ["scale", "report", "--x"], ["scale", "paper"], ["completion", "csh"],
    ["generate", "run", "--tokens", "many"]], ids=" ".join)
def test_each_command_reports_invalid_arguments_in_the_same_form(words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ezpz-llm", *words])
    assert cli.main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    labels = [line[:11] for line in printed.err.splitlines()]
    assert labels[0].startswith("error: ")
    assert labels[1:] in (["  where:   ", "  instead: "], ["  instead: "]), printed.err
    assert not re.search("usage:|argument |invalid .* value|expected one", printed.err), printed.err


@pytest.mark.parametrize("command", find_commands())
@pytest.mark.parametrize("begin", ["ezpz-llm ", "python3 -m ezpz_llm."])
def test_usage_line_of_each_command_is_as_typed(command, begin, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{begin}{command}" if begin == "ezpz-llm " else "/a/path/__main__.py"])
    assert page(capsys, command).startswith(f"usage: {begin}{command} ")


def test_list_of_commands_is_grouped_and_complete():
    done = subprocess.run([sys.executable, "-c", "from ezpz_llm.cli import main; main()"], capture_output=True,
                          text=True, timeout=scaled(60), check=False, env={"COLUMNS": "60", "PATH": ""})
    named = re.findall(r"^  ([a-z_]+)  ", done.stdout, re.MULTILINE)
    assert sorted(named) == list(find_commands())
    assert done.stdout.count("\n\n") == 7
