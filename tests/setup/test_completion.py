"""Shell completion in bash, zsh and fish, compared with the commands' parsers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from slowness import scaled

from ezpz_llm.training.layout.batch import option_of
from ezpz_llm.training.layout.ds_config import names
from ezpz_llm.training.model.config import MODELS
from ezpz_llm.training.trainer.config import FIELDS

ASK = """
complete() { :; }
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
_ezpz_llm
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    paths = {}
    for shell in ("bash", "zsh", "fish"):
        done = subprocess.run([sys.executable, "-m", "ezpz_llm.completion", shell], capture_output=True, text=True,
                              timeout=scaled(120), check=True)
        paths[shell] = folder / shell
        paths[shell].write_text(done.stdout)
    return paths


def offered(shell: str, script: Path, *words: str) -> set[str]:
    """Return the completions of the last word."""
    begin = {"bash": [], "zsh": ["-f"]}[shell]
    done = subprocess.run([shell, *begin, "-c", ASK, shell, str(script), *words], capture_output=True, text=True,
                          timeout=scaled(60), check=False)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completions(shell: str, scripts: dict[str, Path]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")

    def ask(*words: str) -> set[str]:
        return offered(shell, scripts[shell], *words)

    assert {"train", "certify", "report", "completion"} <= ask("ezpz-llm", "")
    assert ask("ezpz-llm", "cert") == {"certify"}
    assert set(map(option_of, FIELDS)) <= ask("ezpz-llm", "train", "--lr", "1", "--")
    assert set(map(option_of, FIELDS)) <= ask("launch", "-n", "2", "python3", "-m", "ezpz_llm.train", "--")
    assert ask("/x/bin/launch", "--idle") == {"--idle-timeout"}
    assert ask("/x/bin/launch", "--start-t") == {"--start-timeout"}
    assert ask("ezpz-llm", "train", "--ds-config", "") == set(names())
    assert ask("ezpz-llm", "train", "--ds-config", "=", "zero3_n") == {"zero3_nvme"}
    assert ask("ezpz-llm", "layouts", "--model", "") == set(MODELS)
    assert "tf32" in ask("ezpz-llm", "train", "--precision", "")
    assert {"inspect", "verify"} <= ask("ezpz-llm", "checkpoint", "")
    assert "--dtype" in ask("ezpz-llm", "checkpoint", "export", "x", "--")
    assert ask("ezpz-llm", "report", "runs/a", "--ht") == {"--html"}
    assert ask("ezpz-llm", "completion", "z") == {"zsh"}
    assert ask("ezpz-llm", "report", "runs/") == set(), "the shell completes file names"


def test_bash_registers_both_commands(scripts: dict[str, Path]) -> None:
    done = subprocess.run(["bash", "-c", 'source "$1"; complete -p launch ezpz-llm', "bash", str(scripts["bash"])],
                          capture_output=True, text=True, timeout=scaled(60), check=True)
    assert done.stdout.splitlines() == ["complete -o default -F _ezpz_llm launch",
                                        "complete -o default -F _ezpz_llm ezpz-llm"]


def test_fish_has_every_option_of_train(scripts: dict[str, Path]) -> None:
    lines = scripts["fish"].read_text().splitlines()
    begin = "complete -c ezpz-llm -n '__fish_seen_subcommand_from train' -l "
    assert {option_of(name)[2:] for name in FIELDS} <= {
        line.removeprefix(begin).split()[0] for line in lines if line.startswith(begin)}
    if shutil.which("fish"):
        subprocess.run(["fish", "--no-config", str(scripts["fish"])], timeout=scaled(60), check=True)
