"""Print a completion script for launch and ezpz-llm, for bash, zsh or fish."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Callable, Sequence

from ezpz_llm.cli import find_commands, module_of
from ezpz_llm.core.base import print_lines, run_command
from ezpz_llm.core.base.command_parser import CommandParser
from ezpz_llm.training.layout.ds_config import names
from ezpz_llm.training.model.config import MODELS
from ezpz_llm.training.trainer.config import PRESETS

_OPTION = re.compile(r"^ {2,4}(?:-\w(?: \S+)?, )*(--[a-z][a-z0-9-]*)(?: \{([^}]*)\})?", re.MULTILINE)
_SUBCOMMAND = re.compile(r"^    ([a-z][a-z0-9_-]*)(?:  |$)", re.MULTILINE)

_BASH = """\
_ezpz_llm() {
    [ -z "$ZSH_VERSION" ] || emulate -L ksh
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command= at=-1 i word values=
    [ "$cur" != = ] || cur=
    [ "$prev" != = ] || prev=${COMP_WORDS[COMP_CWORD-2]}
    for ((i = 0; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]##*/}
        case $word in
            ezpz-llm|launch) command=$word at=$i ;;
            ezpz_llm.*) command=${word#ezpz_llm.} at=$i ;;
            [a-z]*) if [ "$command" = ezpz-llm ]; then command=${word//-/_} at=$i
                    elif [ $i = $((at + 1)) ]; then
                        case "$command $word" in %(below)s) command="$command $word" ;; esac
                    fi ;;
        esac
    done
    case $prev in
%(values)s
    esac
    if [ -z "$values" ]; then
        case $command in
%(words)s
        esac
    fi
    COMPREPLY=()
    for word in $values; do case $word in "$cur"*) COMPREPLY+=("$word") ;; esac; done
}
complete -o default -F _ezpz_llm ezpz-llm launch
"""
_ZSH = "autoload -U +X compinit && compinit -u\nautoload -U +X bashcompinit && bashcompinit\n"


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = CommandParser("completion", description=__doc__, shown=(
        'eval "$(ezpz-llm completion bash)"',
        "ezpz-llm completion zsh >> ~/.zshrc",
        "ezpz-llm completion fish > ~/.config/fish/completions/ezpz-llm.fish"))
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="your shell")
    shell = parser.parse_args(list(argv)).shell
    script = _fish(*collect()) if shell == "fish" else _bash(*collect())
    print_lines((_ZSH if shell == "zsh" else "") + script, end="")
    return 0


def collect() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the words after each command ("data", "data prepare"), and the values of options with choices."""
    commands = find_commands()
    values = {"--preset": sorted(PRESETS), "--ds-config": names(), "--layouts": ["all", *names()],
              "--model": list(MODELS)}
    words = {"ezpz-llm": [*commands, "--help", "--version"]}
    for name, path in commands.items():
        try:
            run = importlib.import_module(module_of(path)).main
            text = _help(run)
        except ModuleNotFoundError:  # ezpz_llm[train] is not installed
            words[name] = []
            continue
        subcommands = _SUBCOMMAND.findall(text)
        words[name] = subcommands + _options(text, values)
        for sub in subcommands:
            words[f"{name} {sub}"] = _options(_help(run, sub), values)
    words["completion"] += ["bash", "zsh", "fish"]
    return words, values


def _help(run: Callable[[Sequence[str]], object], *words: str) -> str:
    """Return the pages of `--help` and, if it is mentioned there, of `--help-all`."""
    text = io.StringIO()
    for option in ("--help", "--help-all"):
        if option == "--help" or option in text.getvalue():
            with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
                run([*words, option])
    return text.getvalue()


def _options(text: str, values: dict[str, list[str]]) -> list[str]:
    choices_of = dict(_OPTION.findall(text))
    for option, choices in choices_of.items():
        if choices:
            values[option] = list(dict.fromkeys([*values.get(option, ()), *choices.split(",")]))
    return list(choices_of)


def _bash(words: dict[str, list[str]], values: dict[str, list[str]]) -> str:
    def cases(table: dict[str, list[str]], indent: int) -> str:
        return "\n".join(f'{" " * indent}"{key}") values="{" ".join(table[key])}" ;;' for key in table)

    below = "|".join(f'"{key}"' for key in words if " " in key)
    return _BASH % {"below": below, "values": cases(values, 8), "words": cases(words, 12)}


def _fish(words: dict[str, list[str]], values: dict[str, list[str]]) -> str:
    lines = ["complete -c ezpz-llm -n __fish_use_subcommand -f -a '" + " ".join(words["ezpz-llm"]) + "'"]
    for key, following in words.items():
        command, _, sub = key.partition(" ")
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in (command, sub) if word)
        for start in ["-c launch"] * (key == "launch") + [f"-c ezpz-llm -n '{seen}'"] * (key != "ezpz-llm"):
            plain = [word for word in following if not word.startswith("-")]
            lines += [f"complete {start} -f -a '{' '.join(plain)}'"] if plain else []
            for option in (word for word in following if word.startswith("--")):
                choices = f" -x -a '{' '.join(values[option])}'" if option in values else ""
                lines.append(f"complete {start} -l {option[2:]}{choices}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(run_command(main))
