"""Private names of argparse: their effect in this Python, and an error if a Python lacks one."""

from __future__ import annotations

import argparse

import pytest

from ezpz_llm.core.base.command_parser import CommandParser, HelpFormatter, action_of, option_strings
from ezpz_llm.core.base.errors import UserError


@pytest.fixture
def parser() -> CommandParser:
    parser = CommandParser("data", description="First paragraph.\n\nSecond paragraph.")
    parser.add_argument("-v", "--verbose", action="store_true", help="print more")
    prepare = parser.add_subparsers().add_parser("prepare")
    prepare.add_argument("--shards", metavar="N")
    return parser


def test_options_are_listed_in_order(parser: CommandParser) -> None:
    assert option_strings(parser) == ["-h", "--help", "-v", "--verbose"]


def test_the_action_of_an_option_has_its_help(parser: CommandParser) -> None:
    assert action_of(parser, "-v").help == "print more"


def test_options_of_subcommands_are_suggested(parser: CommandParser) -> None:
    with pytest.raises(UserError) as outer:
        parser.parse_args(["--shards=2"])
    assert "which is an option of" in outer.value.instead
    assert outer.value.instead.endswith("prepare")
    with pytest.raises(UserError, match="--shard") as inner:
        parser.parse_args(["prepare", "--shard", "2"])
    assert "--shards" in inner.value.instead


def test_paragraphs_are_kept(parser: CommandParser) -> None:
    assert "\n\nFirst paragraph.\n\nSecond paragraph.\n\n" in parser.format_help()


def test_a_python_without_a_name_is_reported(parser: CommandParser, monkeypatch: pytest.MonkeyPatch) -> None:
    parser_only = argparse.ArgumentParser()
    del parser_only._actions, parser_only._option_string_actions
    with pytest.raises(UserError, match=r"argparse of Python 3.* has no _actions, which ezpz_llm uses"):
        option_strings(parser_only)
    with pytest.raises(UserError, match="has no _option_string_actions"):
        action_of(parser_only, "-v")
    with monkeypatch.context() as without:
        without.delattr(argparse, "_SubParsersAction")
        with pytest.raises(UserError, match="has no _SubParsersAction"):
            parser.parse_args(["--shards=2"])
    monkeypatch.delattr(argparse.HelpFormatter, "_fill_text")
    with pytest.raises(UserError, match="has no _fill_text"):
        HelpFormatter("data")
