"""Standard input of ranks: empty unless requested or a terminal, and never a rank's program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launch_runs import clean_env, need_mpiexec
from slowness import scaled

from ezpz_llm.launcher.jobs.option_parsing import reads_program


def _shell(folder: Path, script: str, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "list").write_text(text)
    launch = f"{sys.executable} -m ezpz_llm.launch"
    words = ("bash", "-c", script.replace("launch", launch, 1))
    return subprocess.run(words, cwd=folder, env=clean_env(), stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=scaled(120), check=False)


def test_a_loop_over_lines_keeps_its_lines(tmp_path: Path) -> None:
    """Mpiexec reads all of its standard input."""
    need_mpiexec()
    done = _shell(tmp_path, 'while read x; do launch -n 2 --launcher mpiexec echo "got $x"; done < list', "a\nb\n")
    assert [line for line in done.stdout.splitlines() if line.startswith("got")] == ["got a", "got b"], done.stderr


def test_rank_0_reads_standard_input_if_requested(tmp_path: Path) -> None:
    for option, expected in (("--stdin", "a\n"), ("", "")):
        done = _shell(tmp_path, f"cat list | launch {option} -n 1 cat", "a\n")
        assert (done.returncode, done.stdout) == (0, expected), done.stderr


@pytest.mark.parametrize("words", ["-n 2 python3 -", "-n 2 --stdin python3 -", "-n 2 bash -s", "-n 1 python3",
                                   "-n 2 env python3 -"])
def test_a_program_from_standard_input_is_rejected(tmp_path: Path, words: str) -> None:
    done = _shell(tmp_path, f"launch {words} < list", "print(1)\n")
    assert done.returncode == 2
    assert "ranks cannot read their program from standard input" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("command", "expected"), [
    ("python3 -", True), ("python3", True), ("python3 -u -", True), ("python3.11 -X dev", True),
    ("python3 x.py -", False), ("python3 -m x", False), ("python3 -um x", False), ("python3 -c 1", False),
    ("python3 --version", False), ("bash", True), ("bash -s 1", True), ("/bin/zsh -o err", True),
    ("bash -lc x", False), ("sh x.sh", False), ("cat -", False), ("./python-tool", False),
    ("python3 /dev/stdin", True), ("env A=1 python3 -", True), ("nice -n 5 bash -s -", True),
    ("env python3 x.py -", False),
    ("timeout 5 sh /dev/fd/0", True), ("apptainer exec x.sif python3 -", True), ("nohup cat -", False),
])
def test_interpreters_without_a_program(command: str, expected: bool) -> None:
    assert reads_program(tuple(command.split())) is expected
