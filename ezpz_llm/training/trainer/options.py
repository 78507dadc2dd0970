"""Parsing of the command line, a YAML file and presets into a TrainConfig with sources (imports no torch)."""

from __future__ import annotations

import argparse
import itertools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from ezpz_llm.core.base import NoFile, UserError, did_you_mean, print_lines, read_yaml, unknown_name_error
from ezpz_llm.core.base.command_parser import HelpFormatter, action_of, option_strings
from ezpz_llm.core.base.help_pages import examples, typed_name, wrap_paragraph
from ezpz_llm.core.base.synonyms import synonym, unknown_option_error
from ezpz_llm.training.layout.batch import SPELLINGS, option_of
from ezpz_llm.training.layout.value_source import COMMAND_LINE, DEFAULT, Origin, ValueSource
from ezpz_llm.training.trainer.config import FIELDS, FINE_TUNING, PRESETS, RECIPES, SECTIONS, TrainConfig


@dataclass(frozen=True)
class Options:
    """Parsed command line: the configuration, the source of each value, and the options of the command itself."""

    config: TrainConfig
    sources: dict[str, ValueSource]
    print_config: bool
    check: bool
    world_size: int | None
    verbose: bool = False
    """Print all settings and measurements, not only the most important ones."""

    def set(self, source: ValueSource, **values: Any) -> Options:
        """Return a copy with other values, which come from `source`."""
        return replace(self, config=replace(self.config, **values),
                       sources={**self.sources, **dict.fromkeys(values, source)})

    def where(self, name: str) -> str:
        """Return a setting's name and source, for an error message."""
        return f"{name} ({self.sources[name]})"

    def origin(self, name: str) -> Origin:
        """Return the kind of a setting's source."""
        return self.sources[name].origin


_NAMES = {spelling: name for name, spelling in SPELLINGS.items()}
_MAX_DIGITS = 300
"""Limit for whole numbers, below the 309 digits of the largest float."""
_METAVARS = {int: "N", float: "X", bool: "true|false", str: "TEXT"}


_COMMON_OPTIONS = ("--model", "--corpus", "--tokenizer", "--ds-config", "--steps", "--global-batch-size",
                   "--micro-batch-size", "--lr", "--precision", "--preset", "--resume", "--run-dir", "--compile",
                   "--track")
"""Options that --help lists."""
_EXAMPLES = ("launch -n 2 python3 -m ezpz_llm.train",
             "launch python3 -m ezpz_llm.train --model gpt2-124m --corpus my_text/ --ds-config zero1",
             "launch python3 -m ezpz_llm.train --resume runs/train-20261122-011944 --steps 3000")


class _ShortHelp(argparse.Action):
    """Action of --help: print the most used options."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        page = argparse.ArgumentParser(prog=parser.prog, usage="%(prog)s [options]", description=parser.description,
                                       epilog=examples(_EXAMPLES), formatter_class=parser.formatter_class,
                                       add_help=False)
        for option in _COMMON_OPTIONS:
            action = action_of(parser, option)
            page.add_argument(option, metavar=action.metavar, help=action.help)
        print_lines(page.format_help())
        sections = "; ".join(SECTIONS.values())
        print_lines(wrap_paragraph(f"--help-all lists all {len(FIELDS)} settings, in groups: {sections}."))
        parser.exit()


def build_parser() -> ArgumentParser:
    """Return the parser of `ezpz_llm.train`: an option per field of TrainConfig, and options such as --preset."""
    parser = ArgumentParser(prog=typed_name("train"), usage="%(prog)s [options]", add_help=False,
                            description="Train a GPT on text.", exit_on_error=False, epilog=examples(_EXAMPLES),
                            formatter_class=HelpFormatter, allow_abbrev=False)
    hints = get_type_hints(TrainConfig)
    parser.add_argument("-h", "--help", nargs=0, action=_ShortHelp, help="print the most used options and exit")
    parser.add_argument("--help-all", action="help", help="print this help and exit")
    parser.add_argument("--preset", type=str, help=f"named set of settings: {', '.join(sorted(PRESETS))}")
    parser.add_argument("--config", type=str, help="YAML file of settings, and optionally `preset`")
    parser.add_argument("--print-config", action="store_true",
                        help="print the resulting configuration as YAML and exit")
    parser.add_argument("--check", action="store_true",
                        help="check the configuration, without importing torch, and exit")
    parser.add_argument("--json", action="store_true", help="print the result of --check as one JSON object")
    parser.add_argument("--world-size", type=int, help="number of ranks that --check assumes")
    parser.add_argument("--verbose", action="store_true",
                        help="also print every setting with its source, and tables of time and memory")
    section: Any = parser
    for name, field in FIELDS.items():
        if name in SECTIONS:
            section = parser.add_argument_group(SECTIONS[name])
        kinds = get_args(hints[name]) or (hints[name],)
        metavar = _METAVARS.get(kinds[0]) or "{" + ",".join(kinds) + "}"
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        shown = "" if default is None else f" (default: {default})"
        section.add_argument(option_of(name), type=hints[name], default=field.default, metavar=metavar,
                             help=field.metadata["help"] + shown)
    return parser


def parse(argv: Sequence[str]) -> Options:
    """Parse a command line.

    Raises:
        UserError: an option, preset or YAML key is unknown, a value has the wrong type, the file is unreadable,
            or --json is given without --check.
        SystemExit: --help or --help-all (code 0).
    """
    parser = build_parser()
    try:
        given = _by_field(vars(parser.parse_args(argv, defaults=False).clone()))
    except ArgumentError as error:
        raise _parse_error(parser, argv, error) from error
    except OverflowError as error:
        raise _too_large(argv) from error
    other_options = {name: given.pop(name, None)
            for name in ("preset", "config", "print_config", "check", "json", "world_size", "verbose")}
    if other_options["json"] and not other_options["check"]:
        raise UserError("--json requires --check", where="--json", instead="--check --json")
    layers: list[tuple[ValueSource, Mapping[str, Any]]] = []
    from_file = _from_yaml(Path(other_options["config"])) if other_options["config"] else {}
    preset_in_file = from_file.pop("preset", None)
    preset_name = other_options["preset"] or preset_in_file
    if preset_name is not None:
        if preset_name not in PRESETS:
            where = "--preset" if other_options["preset"] else other_options["config"]
            raise unknown_name_error("preset", preset_name, PRESETS, where=where)
        layers.append((ValueSource(Origin.PRESET, preset_name), PRESETS[preset_name]))
    layers += [(ValueSource(Origin.FILE, str(other_options["config"])), from_file), (COMMAND_LINE, given)]

    model = next((layer["model"] for _, layer in reversed(layers) if "model" in layer), TrainConfig.model)
    if any(layer.get("init_from") is not None for _, layer in layers):
        layers.insert(0, (ValueSource(Origin.FINE_TUNING), FINE_TUNING))
    layers.insert(0, (ValueSource(Origin.RECIPE, model), RECIPES.get(model, {})))
    values: dict[str, Any] = {name: field.default for name, field in FIELDS.items()}
    sources = dict.fromkeys(values, DEFAULT)
    for source, layer in layers:
        values.update(layer)
        sources.update(dict.fromkeys(layer, source))
    return Options(TrainConfig(**values), sources, bool(other_options["print_config"]),
                   bool(other_options["check"]), other_options["world_size"], bool(other_options["verbose"]))


def _too_large(argv: Sequence[str]) -> UserError:
    """Return the error for an integer that is too large for a float."""
    words = [word for part in argv for word in part.split("=", 1)]
    where = next((before for before, word in itertools.pairwise(words) if len(word) > _MAX_DIGITS), None)
    return UserError("the number is too large", where=where, instead=f"a number of at most {_MAX_DIGITS} digits")


def _by_field(values: Mapping[str, Any]) -> dict[str, Any]:
    return {_NAMES.get(name, name): value for name, value in values.items()}


def dump(config: TrainConfig) -> str:
    """Return the configuration as YAML that `--config` can read."""
    spelled = {SPELLINGS.get(name, name): value for name, value in asdict(config).items()}
    return build_parser().dump(Namespace(**spelled), skip_validation=True)


def _parse_error(parser: ArgumentParser, argv: Sequence[str], error: Exception) -> UserError:
    """Return the error for a command line that jsonargparse rejected."""
    options = option_strings(parser)
    remark = f"{parser.prog} --help-all lists all options"
    for word in argv:
        option = word.split("=")[0]
        if re.match("--?[A-Za-z]", option) and option not in options:
            return unknown_option_error(option, options, where=parser.prog, remark=remark)
    return _type_error(error, is_option=True, where=parser.prog)


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def _type_error(error: Exception, *, is_option: bool, where: str) -> UserError:
    """Return the error for a value that jsonargparse rejected.

    The error replaces jsonargparse's message, which names Python types.
    """
    text = " ".join(str(error).split())
    match = re.fullmatch(r'Parser key "(\w+)": .* ?(?:Got|Given) value: ?(.*)', text)
    name = match and _NAMES.get(match[1], match[1])
    if match is None or name not in FIELDS:
        return UserError(text, where=where,
                         instead=f"{typed_name('train')} --help-all lists every option and its type")
    value, hint = match[2], get_type_hints(TrainConfig)[name]
    option = option_of(name) if is_option else match[1]
    if isinstance(FIELDS[name].default, str) and (choices := get_args(hint)):
        return unknown_name_error(f"value of {option}", value, choices, where=where)
    kinds = " or ".join(_KINDS.get(kind) or " or ".join(get_args(kind)) for kind in get_args(hint) or (hint,))
    return UserError(f"{option} is {value!r}: it must be {kinds}", where=where)


def _from_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = read_yaml(path)
    except NoFile:
        raise UserError("no such configuration file", where=f"--config {path}",
                        instead=did_you_mean(path)) from None
    except UserError as error:
        raise UserError(f"cannot read the configuration: {error.found}", where=f"--config {path}",
                        instead=error.instead) from error
    if not isinstance(loaded, dict):
        raise UserError("the configuration must consist of `name: value` lines", where=f"--config {path}")
    loaded = {str(name).replace("-", "_"): value for name, value in loaded.items()}
    preset = loaded.pop("preset", None)
    if not isinstance(preset, str | None):
        raise UserError(f"preset is {preset!r}: it must be text", where=os.fspath(path))
    settings = {SPELLINGS.get(name, name): field for name, field in FIELDS.items()}
    for name in loaded:
        if name not in settings:
            raise _unknown_setting(name, settings, where=os.fspath(path))
        if loaded[name] is None and settings[name].default is not None:
            raise UserError(f"{name} has no value", where=os.fspath(path),
                            instead="add a value, or delete the line")
    typed = ArgumentParser(exit_on_error=False)
    hints = get_type_hints(TrainConfig)
    for name in loaded:
        typed.add_argument(f"--{name}", type=hints[_NAMES.get(name, name)])
    try:
        values = _by_field(vars(typed.parse_object(loaded).clone()))
    except Exception as error:  # jsonargparse raises several types, each with the key and the reason in its text
        raise _type_error(error, is_option=False, where=os.fspath(path)) from error
    return {**values, **({"preset": preset} if preset is not None else {})}


def _unknown_setting(name: str, settings: Collection[str], where: str) -> UserError:
    """Return the error for an unknown name in a YAML file; for another trainer's option, with the equivalent
    setting."""
    programs, equivalent = synonym(f"--{name}", [f"--{setting.replace('_', '-')}" for setting in settings])
    if equivalent is None:
        return unknown_name_error("setting", name, settings, where=where)
    as_settings = re.sub(r"--([a-z][a-z0-9-]*)", lambda option: option[1].replace("-", "_") + ":", equivalent)
    return UserError(f"unknown setting {name!r}, an option of {programs}", where=where, instead=as_settings)
