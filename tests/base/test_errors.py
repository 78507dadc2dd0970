"""Error messages of commands that cannot continue."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from slowness import scaled

from ezpz_llm.core import base
from ezpz_llm.core.base import count_noun
from ezpz_llm.core.base.errors import EXIT_USAGE, UserError, did_you_mean, run_command, unknown_name_error
from ezpz_llm.core.base.package_data import user_path
from ezpz_llm.training.data.corpora import find_corpus
from ezpz_llm.training.data.manifest import read_manifest
from ezpz_llm.training.data.tokenizers import choose_tokenizer
from ezpz_llm.training.evaluate.hellaswag import read_items
from ezpz_llm.training.layout.ds_config import load as load_ds_config
from ezpz_llm.training.trainer.options import parse as parse_train


def test_user_error_is_printed_with_place_and_remedy(capsys):
    def main(argv):
        raise UserError("found 3", where="--option", instead="4", exit_code=7)

    assert run_command(main, []) == 7
    assert capsys.readouterr().err == "error: found 3\n  where:   --option\n  instead: 4\n"


def test_full_disk_is_a_message(capsys):
    def main(argv):
        with open("/dev/full", "w") as file:
            file.write("x" * 100_000)

    assert run_command(main, []) == 1
    assert "No space left on device" in capsys.readouterr().err


def test_bugs_keep_their_traceback():
    def main(argv):
        raise FileNotFoundError(2, "No such file", "ours")

    with pytest.raises(FileNotFoundError):
        run_command(main, [])


def test_closed_pipe_is_not_an_error():
    code = ("import sys; from ezpz_llm.core.base.errors import run_command\n"
            "def main(argv):\n    [print('x' * 1000) for _ in range(10000)]\n"
            "sys.exit(run_command(main, []))")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait(timeout=scaled(120)) == 141
        assert b"Traceback" not in process.stderr.read()


def test_removed_working_directory_is_reported(tmp_path):
    code = ("import os, pathlib, sys; from ezpz_llm.core.base.errors import run_command\n"
            "os.rmdir(os.getcwd())\nsys.exit(run_command(lambda argv: print(pathlib.Path('x').absolute()), []))")
    (tmp_path / "gone").mkdir()
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "gone", capture_output=True, text=True,
                          timeout=scaled(120), check=False)
    assert (done.returncode, "the working directory no longer exists" in done.stderr) == (2, True), done.stderr


def test_any_text_can_be_printed_in_any_locale():
    code = ("import sys; from ezpz_llm.core.base.errors import run_command\n"
            "sys.exit(run_command(lambda argv: print('\\xfc\\u2192'), []))")
    done = subprocess.run([sys.executable, "-c", code], env={"LC_ALL": "C", "PYTHONUTF8": "0"}, capture_output=True,
                          timeout=scaled(120), check=False)
    assert (done.returncode, done.stdout) == (0, b"\\xfc\\u2192\n"), done.stderr


def test_unknown_home_directory_is_reported():
    with pytest.raises(UserError, match="'~no-such-user/x' begins with an unknown home directory"):
        user_path("~no-such-user/x")


def test_unknown_name_offers_the_nearest_or_all_names():
    assert "zero1" in unknown_name_error("ds_config", "zer01", ["ddp", "zero1"]).instead
    assert "gpt2-124m" in unknown_name_error("model", "gpt2", ["gpt2-124m", "gpt3-125m", "tiny-gpt2"]).instead
    assert unknown_name_error("ds_config", "qqq", ["ddp", "zero1"]).instead == "known: ddp, zero1"


def test_messages_have_no_optional_plural():
    assert (count_noun(1, "rank"), count_noun(2, "other host")) == ("1 rank", "2 other hosts")
    optional_plurals = []
    for path in Path(base.__file__).parents[1].rglob("*.py"):
        texts = (node.value for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.Constant) and isinstance(node.value, str))
        optional_plurals += [(path.name, text) for text in texts if re.search(r"\w\(e?s\)", text)]
    assert optional_plurals == []


@pytest.mark.parametrize("code", ["0", "None", "256", "False"])
def test_exit_of_other_code_is_not_success(tmp_path: Path, code: str) -> None:
    """A plug-in or a library that calls sys.exit(0) must not make an unfinished command look successful."""
    (tmp_path / "other.py").write_text(f"import sys\ndef act(_):\n    sys.exit({code})\n")
    program = \
        "import other; from ezpz_llm.core.base import run_command; raise SystemExit(run_command(other.act, []))"
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(tmp_path)},
                          text=True, capture_output=True, timeout=scaled(60), check=False)
    assert done.returncode == 1
    assert f"error: the command was ended by sys.exit({code})\n  where:   {tmp_path}/other.py" in done.stderr


@pytest.mark.parametrize("code", [0, 256])
def test_user_error_never_exits_with_0(code: int) -> None:
    assert UserError("x", exit_code=code).exit_code == EXIT_USAGE


def test_a_missing_path_names_the_one_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_text").mkdir()
    assert did_you_mean(tmp_path / "my_tex") == f"did you mean {tmp_path / 'my_text'}?"
    assert did_you_mean(tmp_path / "other", "a file") == "a file"
    assert did_you_mean(tmp_path / "absent/my_tex") is None
    assert did_you_mean("a\0b/my_text") is None
    monkeypatch.chdir(tmp_path)
    for raised in (lambda: find_corpus("my_tex"), lambda: choose_tokenizer("./my_tex"),
                   lambda: load_ds_config("./my_tex"), lambda: read_manifest(Path("my_tex")),
                   lambda: read_items(Path("my_tex")), lambda: parse_train(["--config", "my_tex"])):
        with pytest.raises(UserError) as caught:
            raised()
        assert "my_text?" in str(caught.value.instead)
    assert did_you_mean(tmp_path / "my_text") is None  # exists, but is not what the command needs
